#!/usr/bin/env bash
# fresh.sh KIND COMMAND...: run a command as on a machine that nobody has used. /tmp, /var/tmp, /dev/shm and the home
# directory are empty, and no other process is there; programs, the settings of pip and npm, and this clone stay.
#   disk     /tmp lies on a disk
#   tmpfs    /tmp lies in memory and /var/tmp on a disk, as in Debian 13 and Fedora
#   others   /tmp lies on a disk; another user's files and processes are there; /dev/shm has 64 MiB, as in a container
# Root makes namespaces for that. Without root the command runs on the machine as it is, and a line says so.
# With NEW_VENV=1 the clone's .venv is empty, too.
set -euo pipefail
clone=$(cd "$(dirname "$0")/.." && pwd -P)
state=$clone/build/fresh # on a disk; it goes with the command

outside() {
	local why=$state.log
	mkdir -p "$clone/build"
	if [ "$(id -u)" != 0 ]; then
		echo "only root makes namespaces" >"$why"
	elif separated "$1" true 2>"$why"; then
		local status=0
		separated "$@" || status=$?
		rm -rf "$state" "$why"
		exit $status
	fi
	echo "fresh.sh: this machine as it is, with all that others have left: $(head -n 1 "$why")" >&2
	cd "$clone"
	exec "${@:2}"
}

separated() {
	rm -rf "$state"
	mkdir -p "$state"/{tmp,var,home,venv}
	INSIDE=1 unshare --mount --pid --ipc --fork --kill-child --mount-proc --propagation private bash "$0" "$@"
}

inside() {
	local kind=$1 home=${HOME:-/root} prefix path number
	local -A kept=()
	prefix=$(${PYTHON:-python3} -c 'import sys; print(sys.base_prefix)')
	# By their descriptors, as their paths may lie below one that is about to be covered.
	for path in "$state" "$clone" "$prefix" "$home"/{.config/pip,.pip,.npmrc} ${PATH//:/ }; do
		case $path in
		"$state" | "$home"/* | /tmp/* | /var/tmp/*)
			if [ -e "$path" ] && [ -z "${kept[$path]:-}" ]; then
				exec {number}<"$path"
				kept[$path]=$number
			fi
			;;
		esac
	done
	cover() { mount --no-canonicalize --rbind "/proc/self/fd/$1" "$2"; }
	# First in PATH: a shim below the home directory finds nothing any more of what it stands for.
	[ -z "${kept[$prefix]:-}" ] || export PATH=$prefix/bin:$PATH
	local ours=${kept[$state]}
	unset "kept[$state]"
	[ -z "${NEW_VENV:-}" ] || { mkdir -p "$clone/.venv" && mount --bind "$state/venv" "$clone/.venv"; }
	chmod 1777 "$state"/{tmp,var}
	chmod 700 "$state/home"
	cover "$ours/home" "$home"
	cover "$ours/var" /var/tmp
	if [ "$kind" = tmpfs ]; then mount -t tmpfs -o mode=1777 tmpfs /tmp; else cover "$ours/tmp" /tmp; fi
	mount -t tmpfs -o "mode=1777$([ "$kind" != others ] || echo ,size=64m)" tmpfs /dev/shm
	while read -r path; do # the outer ones first
		number=${kept[$path]}
		mkdir -p "$(dirname "$path")"
		if [ -d "/proc/self/fd/$number" ]; then mkdir -p "$path"; else touch "$path"; fi
		cover "$number" "$path"
		exec {number}<&-
	done < <([ ${#kept[@]} = 0 ] || printf '%s\n' "${!kept[@]}" | sort)
	exec {ours}<&-
	unset INSIDE NEW_VENV TMPDIR TEMP TMP XDG_CACHE_HOME XDG_RUNTIME_DIR
	# The clone may be somebody else's, whom the settings in the home directory name.
	export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0=$clone
	cd "$clone"
	if [ "$kind" = others ]; then read -r < <(exec python3 tests/others.py); fi
	"${@:2}"
	exit # not by exec: this shell waits for processes whose parents have ended
}

if [ -n "${INSIDE:-}" ]; then inside "$@"; else outside "$@"; fi
