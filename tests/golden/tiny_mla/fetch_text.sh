#!/bin/bash
# Writes FILE, the King James Version with one verse a line: from Debian's packages bible-kjv (the
# program that unpacks it) and bible-kjv-text, which are downloaded but not installed.
# Usage: fetch_text.sh FILE
set -euo pipefail
file=$(realpath -m "${1:?"usage: fetch_text.sh FILE"}")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
apt-get download bible-kjv=4.38 bible-kjv-text=4.38
for package in *.deb; do dpkg-deb --extract "$package" .; done
usr/bin/bible -p usr/lib -f Ge1:1-re22:21 >text
# The packages hold the same bytes on every architecture, or this is not the text of the recipe.
sha256sum --check --quiet <<<"cd45f0c9cedab8e4439bd6486c8952c77cc8b0ecc5d1f6ae3513f2039f47229d  text"
mv text "$file"
