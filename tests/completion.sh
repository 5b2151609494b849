#!/bin/sh
# SPDX-License-Identifier: MIT
# bash completion gives what `clattn help` and `clattn SUBCOMMAND --help` say: subcommands, options, their values, files.
set -u
: "${srcdir:?}"
command -v bash > /dev/null || { echo 'bash is not there'; exit 77; }
work=$PWD/tests/completion.work
rm -rf "$work"
mkdir -p "$work/folder/inner"
trap 'rm -rf "$work"' EXIT
: > "$work/folder/a file.npy"
script=$srcdir/packaging/bash/clattn
case $script in /*) ;; *) script=$PWD/$script ;; esac

PROGRAM=$PWD/clattn SCRIPT=$script FOLDER=$work/folder WORK=$work bash --norc --noprofile <<'BASH'
set -u
failures=0 checks=0
source "$SCRIPT"
[[ $(complete -p clattn) == 'complete -F _clattn clattn' ]] || { echo "FAIL: $(complete -p clattn)"; exit 1; }
cd "$FOLDER"

# offered WORD... : what is offered in place of the last word, sorted, a line each
offered() {
    COMP_WORDS=(clattn "$@") COMP_CWORD=$# COMPREPLY=()
    _clattn "$PROGRAM" "${@: -1}" "${COMP_WORDS[$# - 1]}" 2> "$WORK/stderr"
    [[ ! -s $WORK/stderr ]] || echo "it says: $(cat "$WORK/stderr")"
    if [[ ${#COMPREPLY[@]} -gt 0 ]]; then printf '%s\n' "${COMPREPLY[@]}" | LC_ALL=C sort; fi
}
# same EXPECTED WORD... : EXPECTED is a line an entry
same() {
    local wanted=$1
    shift
    checks=$((checks + 1))
    local got
    got=$(offered "$@")
    if [[ $got != "$(LC_ALL=C sort <<< "$wanted")" ]]; then
        echo "FAIL: clattn $*: wanted $wanted, got $got"
        failures=$((failures + 1))
    fi
}
lines() { printf '%s\n' "$@"; }

subcommands=$("$PROGRAM" help | awk '/^Subcommands:/ {on = 1; next} !NF {on = 0} on {print $1}')
[[ $(wc -l <<< "$subcommands") -gt 3 ]] || { echo 'FAIL: no subcommands'; exit 1; }
same "$(lines $subcommands --help --version)" ''
same "$subcommands" help ''
same run ru
same '' nonsense ''
same '' help run ''
same "$(lines 'a file.npy' inner)" compare ''
same "$(lines 'a file.npy')" compare a.json a
for name in $subcommands; do
    [[ $name == help ]] && continue
    # An option's line is indented by two; a table's or an example's does not begin with --.
    "$PROGRAM" "$name" --help | awk '/^  --/ {print $1, $2}' > "$WORK/options"
    same "$(cut -d' ' -f1 "$WORK/options")" "$name" --
    while read -r option argument; do
        case $argument in
        FILE)
            same "$(lines 'a file.npy' inner)" "$name" "$option" ''
            same "$(lines 'a file.npy')" "$name" "$option" = 'a'
            ;;
        DIR) same inner "$name" "$option" '' ;;
        *'|'*)
            choices=$(tr '|' '\n' <<< "$argument" | sed '/^[A-Z]/d')
            same "$choices" "$name" "$option" ''
            same "$choices" "$name" "$option" =
            first=${choices%%$'\n'*}
            [[ -z $choices ]] || same "$(grep -- "^$first" <<< "$choices")" "$name" "$option" = "$first"
            ;;
        esac
    done < "$WORK/options"
done
echo "$checks completions"
[[ $failures == 0 && $checks -gt 30 ]]
BASH
