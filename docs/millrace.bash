# bash completion of millrace
_millrace() {
  local cur=${COMP_WORDS[COMP_CWORD]} cmd=${COMP_WORDS[1]:-} page
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "run plan status check merge score model quantize bench devices --help --version" -- "$cur"))
  elif [ "$cmd" = model ] && [ "$COMP_CWORD" -eq 2 ]; then
    COMPREPLY=($(compgen -W "info tokenize detokenize template" -- "$cur"))
  elif [ "$cmd" = bench ] && [ "$COMP_CWORD" -eq 2 ]; then
    COMPREPLY=($(compgen -W "kernels machine device throughput accuracy" -- "$cur"))
  elif [[ $cur == -* ]]; then
    # the help page is the one list of options
    page=("$cmd")
    [ "$cmd" = model ] && page+=("${COMP_WORDS[2]}")
    COMPREPLY=($(compgen -W "$(millrace "${page[@]}" --help 2>/dev/null | grep -oE -- '--[a-z][a-z0-9-]*' | sort -u)" -- "$cur"))
  else
    COMPREPLY=($(compgen -f -- "$cur"))
  fi
}
complete -o filenames -F _millrace millrace
