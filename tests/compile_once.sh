#!/bin/sh
# Does what c++ does with these arguments, once for each arguments and inputs of a run of tests: hundreds of processes
# compile the same kernels. What was made lies beside this file, which the tests copy to a folder of their own.
made=$(dirname "$0")
for one; do before=$output && output=$one; done # the last argument
[ "$before" = -o ] || exec c++ "$@" # nothing is made, as with --version, or not by our kernels
key=$(
    for one; do
        printf '%s\n' "$one"
        case $one in
            -I*) cat "${one#-I}"/*.h ;;
            *) [ "$one" = "$output" ] || [ ! -f "$one" ] || cat "$one" ;;
        esac
    done | sha256sum
)
key=${key%% *}
if [ ! -f "$made/$key" ]; then
    c++ "$@" || exit
    cp "$output" "$made/$key.$$" && mv "$made/$key.$$" "$made/$key"
else
    cp "$made/$key" "$output"
fi
