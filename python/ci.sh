#!/usr/bin/env bash
# Builds the wheel, installs it as a user would into a fresh environment, PyTorch included, runs the tests there, and builds the site,
# which runs the gallery. LONGSPAN_PYTHON names the interpreter; LONGSPAN_WITHOUT_TORCH=1 leaves out what needs PyTorch.
set -euo pipefail
cd "$(dirname "$0")"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${LONGSPAN_PYTHON:-python3}" -m venv "$work/environment"
python="$work/environment/bin/python"
"$python" -m pip install --quiet --upgrade pip
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$work/wheels" .
"$python" -m pip install --quiet "$work"/wheels/longspan-*.whl pytest pytest-xdist mypy basedpyright

# NumPy alone is enough.
"$python" -c 'import longspan, sys; assert "torch" not in sys.modules; print("longspan", longspan.__version__)'
if [[ -z "${LONGSPAN_WITHOUT_TORCH:-}" ]]; then
    "$python" -m pip install --quiet "$(echo "$work"/wheels/longspan-*.whl)[transformers]" accelerate onnxscript onnxruntime
fi
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
