"""Read derivatives: `eg.grad`, `eg.jacobian`, `eg.hessian`, `eg.value`, `eg.field`, `eg.contributions`, `eg.record`.

1. `api` parses the names, binds the arguments and runs the function once. The backend returns a `Linearization`: the
   outputs, and vjp and jvp sweeps between any output and input of it.
2. `jacobian` is the lazy array over one output and one input. An index becomes a selection of rows and of columns.
3. `plan` chooses reverse sweeps for rows or forward ones for columns, whichever are fewer, and cuts them into chunks
   that fit the budget. With a known sparsity pattern, `sparse` packs rows or columns of one colour into one sweep.
4. `sweeps` runs the chunks and picks the requested elements. It compares every forward sweep with reverse ones, and
   falls back to single sweeps or to the other direction where a framework has no rule.
5. Where only a part of the function is needed, `cone` records it and runs that part, and `field` says which it is.
6. `blocks` reads a whole Jacobian piece by piece: here, on `workers`, or to disk (`zarr`). `sparse` prepares one for
   reads at many points, `contributions` splits a derivative over the uses of its source, and `record` reads
   derivatives of eager code that is not a function.
"""
