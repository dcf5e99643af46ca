#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# Builds the guest's two packages for distributions of RPM; see README.md beside this file.
#
#     build-rpm.sh [--version V] --rdma-core SOURCE_TREE OUTPUT_DIR [-- RPMBUILD_OPTION...]
#
# Leaves the source package and both binary packages in OUTPUT_DIR and prints their paths. Needs
# rpmbuild and what the spec file requires.
set -eu

usage="usage: build-rpm.sh [--version V] --rdma-core SOURCE_TREE OUTPUT_DIR [-- RPMBUILD_OPTION...]"
die() { echo "build-rpm.sh: $*" >&2; exit 1; }

here=$(cd "$(dirname "$0")" && pwd)
guest=$(dirname "$here")
version=$(sed -n 's/^MODULE_VERSION("\(.*\)");/\1/p' "$guest/kernel/main.c")
source=
while [ $# -gt 0 ]; do
	case "$1" in
	-h|--help) echo "$usage"; exit 0;;
	--version) [ $# -gt 1 ] || die "$usage"; version=$2; shift 2;;
	--rdma-core) [ $# -gt 1 ] || die "$usage"; source=$2; shift 2;;
	-*) die "unknown option $1";;
	*) break;;
	esac
done
[ $# -gt 0 ] || die "$usage"
out=$1
shift
[ $# -eq 0 ] || [ "$1" = -- ] || die "$usage"
[ $# -eq 0 ] || shift
[ -n "$version" ] || die "no version"
[ -f "$source/libibverbs/driver.h" ] || die "$source is not an rdma-core source tree"
abi=$guest/include/virtio_rdma_abi.h
[ -f "$abi" ] || abi=$(dirname "$guest")/abi/include/virtio_rdma_abi.h
[ -f "$abi" ] || die "virtio_rdma_abi.h is not there"
licenses=$guest/licenses
[ -d "$licenses" ] || licenses=$(dirname "$(dirname "$guest")")/LICENSES
[ -d "$licenses" ] || die "the licences are not there"
mkdir -p "$out"
out=$(cd "$out" && pwd)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The source: what is needed of guest/, with all headers in guest/include.
tree=$work/virtio-rdma-$version
mkdir -p "$tree/guest/kernel" "$tree/guest/provider" "$tree/guest/include" \
	"$tree/guest/packaging/dkms" "$tree/licenses" "$work/SOURCES"
cp "$guest"/kernel/*.c "$guest"/kernel/*.h "$guest/kernel/Kbuild" "$guest/kernel/Makefile" \
	"$tree/guest/kernel/"
# What `make` left behind in a working tree.
rm -f "$tree"/guest/kernel/*.mod.c
cp "$guest"/provider/* "$tree/guest/provider/"
cp "$guest/include/virtio_rdma_uapi.h" "$abi" "$tree/guest/include/"
cp "$here/dkms/dkms.conf" "$tree/guest/packaging/dkms/"
for name in GPL-2.0 BSD-3-Clause Linux-OpenIB; do
	cp "$licenses/$name.txt" "$tree/licenses/"
done
tar -C "$work" -czf "$work/SOURCES/virtio-rdma-$version.tar.gz" "virtio-rdma-$version"
tar -C "$source" --exclude=./build --transform 's|^\.|rdma-core|' \
	-czf "$work/SOURCES/rdma-core.tar.gz" .
sed "s|@VERSION@|$version|" "$here/rpm/virtio-rdma.spec" > "$work/virtio-rdma.spec"

rpmbuild -ba --define "_topdir $work" "$@" "$work/virtio-rdma.spec" > "$work/log" 2>&1 ||
	{ cat "$work/log" >&2; die "rpmbuild failed"; }
find "$work/SRPMS" "$work/RPMS" -name '*.rpm' ! -name '*-debug*' | sort | while read -r rpm; do
	cp "$rpm" "$out/"
	echo "$out/$(basename "$rpm")"
done
