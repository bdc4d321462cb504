"""`shard_map` under the name that each version of JAX has for it, and the option that leaves its checks out."""

import jax

if hasattr(jax, "shard_map"):
    shard_map, UNCHECKED = jax.shard_map, {"check_vma": False}
else:
    from jax.experimental.shard_map import shard_map

    UNCHECKED = {"check_rep": False}

__all__ = ["UNCHECKED", "shard_map"]
