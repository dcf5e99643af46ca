#!/bin/sh
# SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
#
# Builds libvirtio_rdma-rdmav<abi>.so against the rdma-core source tree of a distribution:
#
#     build.sh RDMA_CORE_SOURCE OUTPUT_DIR
#
# The private ABI of libibverbs is that of the tree (34 for rdma-core 34 to 56: Debian 12 and 13),
# so give the tree whose version the guest runs. The tree is copied and not touched. Needs cmake,
# ninja (or make), pkg-config, a C compiler, python3, libnl-3-dev and libnl-route-3-dev. Prints the
# path of the library as its last line; virtio_rdma.driver (for /etc/libibverbs.d) is put beside it.
set -eu

die() { echo "build.sh: $*" >&2; exit 1; }

[ $# -eq 2 ] || die "usage: build.sh RDMA_CORE_SOURCE OUTPUT_DIR"
[ -f "$1/libibverbs/driver.h" ] || die "$1 is not an rdma-core source tree"
source=$(cd "$1" && pwd)
mkdir -p "$2"
out=$(cd "$2" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
guest=$(dirname "$here")
# In the repository the device ABI is beside guest/; a source package brings all headers in
# guest/include.
abi=$guest/include/virtio_rdma_abi.h
[ -f "$abi" ] || abi=$(dirname "$guest")/abi/include/virtio_rdma_abi.h

tree=$out/rdma-core
if [ ! -f "$tree/.copied-from" ] || [ "$(cat "$tree/.copied-from")" != "$source" ]; then
	rm -rf "$tree"
	cp -a "$source" "$tree"
	rm -rf "$tree/build" "$tree/providers/virtio_rdma"
	echo 'add_subdirectory(providers/virtio_rdma)' > "$tree/virtio_rdma.line"
	sed -i -e "/^add_subdirectory(providers\/rxe)/r $tree/virtio_rdma.line" \
		"$tree/CMakeLists.txt"
	grep -q '^add_subdirectory(providers/virtio_rdma)' "$tree/CMakeLists.txt" ||
		die "the tree has no providers/rxe to stand beside"
	echo "$source" > "$tree/.copied-from"
fi
mkdir -p "$tree/providers/virtio_rdma"
cp "$here"/*.c "$here"/*.h "$here/CMakeLists.txt" "$guest/include/virtio_rdma_uapi.h" \
	"$abi" "$tree/providers/virtio_rdma/"

pabi=$(sed -n 's/^set(IBVERBS_PABI_VERSION "\([0-9]*\)").*/\1/p' "$tree/CMakeLists.txt")
[ -n "$pabi" ] || die "no IBVERBS_PABI_VERSION in $source/CMakeLists.txt"
generator=Ninja
command -v ninja > /dev/null || generator='Unix Makefiles'
multiarch=$(${CC:-cc} -print-multiarch 2>/dev/null || true)
cmake -G "$generator" -S "$tree" -B "$tree/build" -DCMAKE_BUILD_TYPE=Release -DNO_PYVERBS=1 \
	-DNO_MAN_PAGES=1 -DCMAKE_INSTALL_SYSCONFDIR=/etc -DCMAKE_INSTALL_PREFIX=/usr \
	-DCMAKE_INSTALL_LIBDIR="lib${multiarch:+/$multiarch}" \
	> "$out/configure.log" 2>&1 || { cat "$out/configure.log" >&2; die "cmake failed"; }
cmake --build "$tree/build" --target "virtio_rdma-rdmav$pabi" >&2
cp "$tree/build/lib/libvirtio_rdma-rdmav$pabi.so" "$here/virtio_rdma.driver" "$out/"
echo "$out/libvirtio_rdma-rdmav$pabi.so"
