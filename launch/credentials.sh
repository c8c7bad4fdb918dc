#!/usr/bin/env bash
# A token and a certificate, with which trainer and samplers on several machines let each other in.
#   launch/credentials.sh FOLDER NAME...     NAMEs: host names and addresses under which they reach each other
# Writes FOLDER/token, cert.pem (its own authority) and key.pem, readable by you alone.
set -euo pipefail
if [ $# -lt 2 ]; then
  sed -n '2,4s/^# *//p' "$0" >&2
  exit 2
fi
folder=$1
shift
names=()
for name in "$@"; do
  if [[ $name =~ ^[0-9.]+$ || $name == *:* ]]; then names+=("IP:$name"); else names+=("DNS:$name"); fi
done
umask 077
mkdir -p "$folder"
openssl rand -hex 32 >"$folder/token"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj /CN=jaxrl \
  -addext "subjectAltName=$(IFS=,; echo "${names[*]}")" -keyout "$folder/key.pem" -out "$folder/cert.pem" 2>/dev/null
