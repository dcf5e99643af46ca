#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# Builds the guest's two Debian packages; see README.md beside this file.
#
#     build-deb.sh [--version V] [--rdma-core SOURCE_TREE | --provider FILE.so] OUTPUT_DIR
#
# Without --rdma-core and --provider only the DKMS package is built. Needs dpkg-deb; for the
# provider what ../provider/build.sh needs.
set -eu

usage="usage: build-deb.sh [--version V] [--rdma-core SOURCE_TREE | --provider FILE.so] OUTPUT_DIR"
die() { echo "build-deb.sh: $*" >&2; exit 1; }
case "${1:-}" in -h|--help) echo "$usage"; exit 0;; esac

here=$(cd "$(dirname "$0")" && pwd)
guest=$(dirname "$here")
version=$(sed -n 's/^MODULE_VERSION("\(.*\)");/\1/p' "$guest/kernel/main.c")
source=
library=
while [ $# -gt 1 ]; do
	case "$1" in
	--version) version=$2; shift 2;;
	--rdma-core) source=$2; shift 2;;
	--provider) library=$2; shift 2;;
	*) die "unknown option $1";;
	esac
done
case "${1:--}" in -*) die "$usage";; esac
[ $# -eq 1 ] || die "$usage"
[ -n "$version" ] || die "no version"
mkdir -p "$1"
out=$(cd "$1" && pwd)
abi=$guest/include/virtio_rdma_abi.h
[ -f "$abi" ] || abi=$(dirname "$guest")/abi/include/virtio_rdma_abi.h
[ -f "$abi" ] || die "virtio_rdma_abi.h is not there"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# fill TEMPLATE FILE: the template with its @NAMES@ replaced.
fill() {
	sed -e "s|@VERSION@|$version|g" -e "s|@ARCH@|${arch:-}|g" -e "s|@LIBC_DEPENDS@|${libc:-}|g" \
		"$1" > "$2"
}

# pack NAME ROOT ARCH: checks nothing that dpkg-deb does not check.
pack() {
	chmod -R u=rwX,go=rX "$2"
	find "$2/DEBIAN" -name 'p*' -exec chmod 755 {} +
	dpkg-deb --root-owner-group -Zxz --build "$2" "$out/$1_${version}_$3.deb" > /dev/null
	echo "$out/$1_${version}_$3.deb"
}

build_dkms() {
	root=$work/dkms
	src=$root/usr/src/virtio-rdma-$version
	doc=$root/usr/share/doc/virtio-rdma-dkms
	mkdir -p "$root/DEBIAN" "$src/include" "$doc"
	cp "$guest"/kernel/*.c "$guest"/kernel/*.h "$guest/kernel/Kbuild" "$guest/kernel/Makefile" \
		"$src/"
	# What `make` left behind in a working tree.
	rm -f "$src"/*.mod.c
	cp "$guest/include/virtio_rdma_uapi.h" "$abi" "$src/include/"
	fill "$here/dkms/dkms.conf" "$src/dkms.conf"
	fill "$here/dkms/control" "$root/DEBIAN/control"
	fill "$here/dkms/postinst" "$root/DEBIAN/postinst"
	fill "$here/dkms/prerm" "$root/DEBIAN/prerm"
	cp "$here/dkms/copyright" "$doc/"
	pack virtio-rdma-dkms "$root" all
}

# The glibc that the library was linked against is the oldest that it surely runs with.
libc_depends() {
	needs=$(objdump -T "$1" | sed -n 's/.*GLIBC_\([0-9.]*\).*/\1/p' | sort -uV | tail -n 1)
	[ -z "$needs" ] || echo "libc6 (>= $needs), "
}

build_provider() {
	if [ -z "$library" ]; then
		library=$("$guest/provider/build.sh" "$source" "$work/provider-build" | tail -n 1)
	fi
	case "$(basename "$library")" in
	libvirtio_rdma-rdmav34.so) ;;
	*) die "$library: the package is for libibverbs' private ABI 34 (rdma-core 34 to 56)";;
	esac
	arch=$(dpkg --print-architecture)
	multiarch=$(${CC:-cc} -print-multiarch 2>/dev/null || true)
	libc=$(libc_depends "$library")
	root=$work/provider
	lib=$root/usr/lib${multiarch:+/$multiarch}/libibverbs
	doc=$root/usr/share/doc/virtio-rdma-provider
	mkdir -p "$root/DEBIAN" "$lib" "$root/etc/libibverbs.d" "$doc"
	cp "$library" "$lib/"
	${STRIP:-strip} --strip-unneeded "$lib/$(basename "$library")"
	chmod 644 "$lib/$(basename "$library")"
	cp "$guest/provider/virtio_rdma.driver" "$root/etc/libibverbs.d/"
	fill "$here/provider/control" "$root/DEBIAN/control"
	# Not a conffile: a .driver line without its library makes every verbs program complain, so
	# both go together.
	cp "$here/provider/copyright" "$doc/"
	pack virtio-rdma-provider "$root" "$arch"
}

build_dkms
if [ -n "$source" ] || [ -n "$library" ]; then
	build_provider
fi
