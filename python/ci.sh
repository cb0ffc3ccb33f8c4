#!/usr/bin/env bash
# Builds the wheel, installs it as a user would into a fresh environment, PyTorch included, runs the tests there, and builds the site,
# which runs the gallery. LONGSPAN_PYTHON names the interpreter; LONGSPAN_WITHOUT_TORCH=1 leaves out what needs PyTorch.
set -euo pipefail
cd "$(dirname "$0")"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
environment() { "${LONGSPAN_PYTHON:-python3}" -m venv "$work/$1" && "$work/$1/bin/python" -m pip install --quiet --upgrade pip; }
environment whole
python="$work/whole/bin/python"
# What takes minutes to fetch and unpack, while the wheel is built.
libraries=(pytest pytest-xdist mypy basedpyright)
if [[ -z "${LONGSPAN_WITHOUT_TORCH:-}" ]]; then
    extra='import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["transformers"])'
    libraries+=($("$python" -c "$extra") accelerate onnxscript onnxruntime)
fi
"$python" -m pip install --quiet "${libraries[@]}" &
environment bare
bare="$work/bare/bin/python"
"$bare" -m pip wheel --quiet --no-deps --wheel-dir "$work/wheels" .
wheel=$(echo "$work"/wheels/longspan-*.whl)
# NumPy alone is enough.
"$bare" -m pip install --quiet "$wheel"
"$bare" -c 'import longspan; print("longspan", longspan.__version__)'
wait $!
[[ -n "${LONGSPAN_WITHOUT_TORCH:-}" ]] || wheel+="[transformers]"
"$python" -m pip install --quiet "$wheel"
"$python" -c 'import longspan, sys; assert "torch" not in sys.modules'

# Tests run on one thread, so as many at once as there are processors.
tests() { "$python" -m pytest -q -n logical --dist worksteal --durations=5 "$@"; }
tests tests
if [[ -z "${LONGSPAN_WITHOUT_TORCH:-}" ]]; then
    # The kernels for devices, by Triton's interpreter, which has to be asked for before Triton is imported.
    TRITON_INTERPRET=1 tests tests/test_triton.py
    tests ../benchmarks
    "$python" -m pip install --quiet -r ../docs/site/requirements.txt
    PYTHON="$python" ../docs/site/build "$work/site"
fi
LONGSPAN_FUZZ_SEED=$RANDOM "$python" -m pytest -q tests/test_bad_input.py -k fuzz
