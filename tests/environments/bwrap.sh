#!/bin/sh
# Puts bubblewrap into a virtual environment, without root: bwrap.sh ENVIRONMENT. Does nothing where it is installed.
set -eu
environment=$(cd "$1" && pwd)
command -v bwrap >/dev/null && exit 0
"$environment/bin/bwrap" --version >/dev/null 2>&1 && exit 0
folder=$environment/bwrap
fail() {
	echo "bubblewrap is needed, and is neither installed nor to be downloaded here ($1): apt install bubblewrap" >&2
	exit 1
}
rm -rf "$folder"
mkdir -p "$folder"
command -v apt-get >/dev/null && command -v dpkg >/dev/null || fail "no apt-get and dpkg"
cd "$folder"
log=$folder/log
for package in bubblewrap libcap2 libselinux1; do
	apt-get download "$package" >"$log" 2>&1 || { apt-get update >"$log" 2>&1 && apt-get download "$package" >"$log" 2>&1; } ||
		fail "$(tail -n 1 "$log")"
done
for package in ./*.deb; do
	dpkg -x "$package" "$folder"
done
ln -sf "$folder/usr/bin/bwrap" "$environment/bin/bwrap"
"$environment/bin/bwrap" --version >/dev/null 2>&1 && exit 0
# The machine lacks its libraries.
libraries=$(find "$folder" -name 'lib*.so.*' -exec dirname {} \; | sort -u | tr '\n' ':')
rm "$environment/bin/bwrap"
cat >"$environment/bin/bwrap" <<SCRIPT
#!/bin/sh
LD_LIBRARY_PATH=$libraries exec "$folder/usr/bin/bwrap" "\$@"
SCRIPT
chmod +x "$environment/bin/bwrap"
"$environment/bin/bwrap" --version >/dev/null || fail "the downloaded one does not start"
