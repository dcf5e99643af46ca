#!/bin/sh
# SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
#
# Builds the libraries of NICs for processes from the source of rdma-core:
#
#     build.sh RDMA_CORE_SOURCE OUTPUT_DIR
#
# libibverbs.so.1 has our provider in it and stands for the distribution's, as librdmacm.so.1 does
# with connections by it; libvhost_rdma_heap.so is the shared heap, libvhost_rdma_files.so the files
# that programs look for beside a device. The tree is copied, patched (patches/) and not touched
# itself. Needs cmake, ninja (or make), pkg-config, patch, a C compiler, python3, libnl-3-dev and
# libnl-route-3-dev. Prints the folder of the libraries as its last line.
set -eu

die() { echo "build.sh: $*" >&2; exit 1; }

[ $# -eq 2 ] || die "usage: build.sh RDMA_CORE_SOURCE OUTPUT_DIR"
[ -f "$1/libibverbs/driver.h" ] || die "$1 is not an rdma-core source tree"
source=$(cd "$1" && pwd)
mkdir -p "$2"
out=$(cd "$2" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
guest=$(dirname "$here")/guest
abi=$(dirname "$here")/abi/include/virtio_rdma_abi.h

tree=$out/rdma-core
stamp=$(cat "$here"/patches/*.patch "$here/build.sh" | cksum)
if [ ! -f "$tree/.made-of" ] || [ "$(cat "$tree/.made-of")" != "$source $stamp" ]; then
	rm -rf "$tree"
	cp -a "$source" "$tree"
	rm -rf "$tree/build" "$tree/.git"
	for patch in "$here"/patches/*.patch; do
		patch -s -p1 -d "$tree" < "$patch" || die "$patch does not apply"
	done
	# Our provider is a part of the library: no file in /etc has to name it.
	sources='local/device.c local/kernel.c local/kernel_dm.c local/memory.c local/session.c'
	sources="$sources local/kernel_mr.c local/private.c local/mirror.c local/jobs.c local/cm.c"
	sources="$sources local/idle.c local/loan.c local/maps.c local/events.c local/apart.c"
	for file in ah cq cq_ex dm mr post post_ex qp srq; do
		sources="$sources local/$file.c"
	done
	sources="$sources local/rings.c"
	sed -i "s#^  all_providers.c#  all_providers.c\n  $sources#" "$tree/libibverbs/CMakeLists.txt"
	cat >> "$tree/libibverbs/CMakeLists.txt" <<-'CMAKE'
	file(GLOB LOCAL_SHARED local/ah.c local/cq.c local/cq_ex.c local/dm.c local/mr.c
	  local/post.c local/post_ex.c local/qp.c local/srq.c local/rings.c)
	set_source_files_properties(${LOCAL_SHARED} PROPERTIES COMPILE_OPTIONS
	  "-include;${CMAKE_CURRENT_SOURCE_DIR}/local/kernel.h")
	# It stays after dlclose(3), as rdma-core's does once a provider is loaded: else what it
	# keeps for the next device would stay, and nobody would know of it.
	set_property(TARGET ibverbs APPEND_STRING PROPERTY LINK_FLAGS " -Wl,-z,nodelete")
	CMAKE
	echo "$source $stamp" > "$tree/.made-of"
fi
mkdir -p "$tree/libibverbs/local"
for file in ah.c cq.c cq_ex.c dm.c mr.c post.c post_ex.c qp.c srq.c virtio_rdma.c virtio_rdma.h \
	doorbell.h; do
	cp "$guest/provider/$file" "$tree/libibverbs/local/"
done
# Two sources have the same name: rings of the guest's provider, memory of ours.
cp "$guest/provider/memory.c" "$tree/libibverbs/local/rings.c"
cp "$guest/kernel/qp_attr.h" "$here"/provider/*.[ch] "$guest/include/virtio_rdma_uapi.h" \
	"$abi" "$tree/libibverbs/local/"

generator=Ninja
command -v ninja > /dev/null || generator='Unix Makefiles'
[ -f "$tree/build/CMakeCache.txt" ] ||
	cmake -G "$generator" -S "$tree" -B "$tree/build" -DCMAKE_BUILD_TYPE=Release -DNO_PYVERBS=1 \
		-DNO_MAN_PAGES=1 -DCMAKE_INSTALL_SYSCONFDIR=/etc -DCMAKE_INSTALL_PREFIX=/usr \
		-DCMAKE_INSTALL_LIBDIR="lib/$(${CC:-cc} -print-multiarch)" -DCMAKE_SKIP_RPATH=1 \
		> "$out/configure.log" 2>&1 || { cat "$out/configure.log" >&2; die "cmake failed"; }
cmake --build "$tree/build" --target ibverbs rdmacm >&2
mkdir -p "$out/lib"
cp -P "$tree"/build/lib/libibverbs.so.1* "$tree"/build/lib/librdmacm.so.1* "$out/lib/"
${CC:-cc} -O2 -g -Wall -Wextra -fPIC -shared -fvisibility=hidden -fno-builtin \
	-o "$out/lib/libvhost_rdma_heap.so" "$here/heap/heap.c" "$here/heap/pages.c" -lpthread -ldl
${CC:-cc} -O2 -g -Wall -Wextra -fPIC -shared -fvisibility=hidden \
	-o "$out/lib/libvhost_rdma_files.so" "$here/files/files.c" -ldl
echo "$out/lib"
