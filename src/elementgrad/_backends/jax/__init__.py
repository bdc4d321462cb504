"""The JAX backend.

A function runs on copies of all that it could write to, so that it can be traced any number of times. It is linearized
once; forward sweeps evaluate that linear program, reverse sweeps its transpose, and stacks of seeds run under vmap.
What is compiled for it is found by the equations of its trace (`compile_cache`), whichever function they are from. Tags
are equations in the jaxpr: to capture one, the function is traced and its jaxpr evaluated equation by equation. A
module is any callable that is a pytree, and names are paths in it. Parameters are never written to: training and
patches return new ones. `sharding.py` reads and writes elements of sharded arrays without gathering them.
"""
