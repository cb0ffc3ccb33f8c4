# `just --list` shows what there is.

# Formats, lints and runs the unit tests: minutes after the first build
fast:
    bash .ci/run fast

# All that must pass before a change lands
full:
    bash .ci/run

# The kernels beside the machine's own limits: `just bench kernelized --quick`
bench program="attention" *options:
    cargo bench -p longspan-bench --bench {{program}} -- {{options}}

# The kernels' tests on an emulated aarch64 processor
neon:
    bash .ci/neon

# The kernels' tests under a sanitizer: `thread` for data races, `address` for memory beyond an allocation
sanitize kind="thread":
    bash .ci/sanitize {{kind}}

# The documentation of all crates, opened in a browser
docs:
    cargo doc --release --workspace --no-deps --open
