
# no space after a key, and files where no word fits
_areal_lite() {
  _shtab_areal_lite
  if [[ "${COMPREPLY[*]}" == *= ]]; then compopt -o nospace 2>/dev/null; fi
}
complete -o default -F _areal_lite areal-lite
