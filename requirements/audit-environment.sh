# For scripts that begin with it: the environment of audit.txt, in `environment`.
environment=.bench/audit
if ! [ "$environment/.installed" -nt requirements/audit.txt ]; then
  rm -rf "$environment"
  "${PYTHON:-python3.11}" -m venv "$environment"
  requirements/install.sh "$environment" audit.txt
  touch "$environment/.installed"
fi
