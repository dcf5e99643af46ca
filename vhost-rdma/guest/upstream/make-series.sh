#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# Makes patch series of the guest's parts:
#
#     make-series.sh kernel    LINUX_TREE     OUTPUT_DIR
#     make-series.sh rdma-core RDMA_CORE_TREE OUTPUT_DIR
#
# The tree is read and not touched; it need not be a git repository. OUTPUT_DIR gets *.patch, which
# apply to that tree with `git am`, and tree/, the files as they are afterwards. Needs git.
#
# What serves several kernels drops out: compat.h is not part of the series, each of its names is
# replaced by what the newest kernel has in its place (the table in newest_form).
set -eu

die() { echo "make-series.sh: $*" >&2; exit 1; }

[ $# -eq 3 ] || die "usage: make-series.sh kernel|rdma-core TREE OUTPUT_DIR"
here=$(cd "$(dirname "$0")" && pwd)
guest=$(dirname "$here")
abi=$(dirname "$guest")/abi/include/virtio_rdma_abi.h
[ -f "$abi" ] || die "virtio_rdma_abi.h is not there"
[ -d "$2" ] || die "$2 is no tree"
source=$(cd "$2" && pwd)
mkdir -p "$3"
out=$(cd "$3" && pwd)
tree=$out/tree
rm -rf "$tree" "$out"/*.patch
mkdir "$tree"

git_() {
	git -C "$tree" -c user.name="The vhost-rdma authors" -c user.email="vhost-rdma@localhost" \
		-c commit.gpgsign=false -c core.autocrlf=false "$@"
}

# base FILE...: the files of the tree that the series changes.
base() {
	git_ init -q
	for file; do
		[ -f "$source/$file" ] || die "the tree has no $file"
		mkdir -p "$tree/$(dirname "$file")"
		cp "$source/$file" "$tree/$file"
	done
	git_ add -A
	git_ commit -q -m base
	git_ tag base
}

# commit: the message from standard input, with a sign-off.
commit() {
	git_ add -A
	git_ commit -q -s -F -
}

# before PATTERN FILE: inserts standard input before the first line that matches.
before() {
	grep -q -- "$1" "$2" || die "$2 has no line like $1"
	cat > "$out/insert"
	awk -v pattern="$1" -v insert="$out/insert" '
		!done && $0 ~ pattern { while ((getline line < insert) > 0) print line; done = 1 }
		{ print }' "$2" > "$out/changed"
	cat "$out/changed" > "$2"
	rm "$out/changed" "$out/insert"
}

finish() {
	git_ format-patch -q -o "$out" --subject-prefix="$1" --cover-letter base
	ls "$out"/*.patch
}

# ---- The kernel ----

newest_form() {
	sed -e '/^#include "compat.h"$/d' \
		-e 's|^#include <rdma/ib_verbs.h>$|&\n#include <rdma/iter.h>|' \
		-e 's|"virtio_rdma_abi.h"|<uapi/linux/virtio_rdma.h>|' \
		-e 's|"virtio_rdma_uapi.h"|<rdma/virtio_rdma-abi.h>|' \
		-e '/^#ifdef VRDMA_HAVE_ATOMIC_WRITE$/,/^#endif$/{/^#/d}' \
		-e 's/VRDMA_CREATE_CQ_ARG/struct uverbs_attr_bundle *attrs/' \
		-e 's/VRDMA_CQ_UDATA/attrs ? \&attrs->driver_udata : NULL/' \
		-e 's/VRDMA_DMABUF_ARG/struct uverbs_attr_bundle *attrs/' \
		-e 's/VRDMA_DMABUF_UDATA/\&attrs->driver_udata/' \
		-e 's/VRDMA_DMAH_ARG/struct ib_dmah *dmah,/' \
		-e 's/VRDMA_DMAH\b/dmah/' \
		-e 's/VRDMA_ROBUST_UDATA/.uverbs_robust_udata = 1,/' \
		-e 's/VRDMA_RESIZE_CQE/unsigned int/' \
		-e 's/VRDMA_RESIZE_CQ_OP/.resize_user_cq/' \
		-e 's/VRDMA_FLUSH_FLAGS/IB_DEVICE_FLUSH_GLOBAL/' \
		-e 's/VRDMA_ATOMIC_WRITE_FLAGS/IB_DEVICE_ATOMIC_WRITE/' \
		-e 's/VRDMA_DRIVER_ID/RDMA_DRIVER_VIRTIO/' \
		-e 's/vrdma_umem_get/ib_umem_get_va/' \
		-e 's/vrdma_vm_flags_mod/vm_flags_mod/' \
		-e 's/vrdma_find_vqs(\(.*\), info)/virtio_find_vqs(\1, info, NULL)/' \
		-e 's|docs/virtio-rdma.md|specification|'
}

kernel() {
	ids=include/uapi/linux/virtio_ids.h
	drivers=include/uapi/rdma/ib_user_ioctl_verbs.h
	base $ids $drivers drivers/infiniband/Kconfig drivers/infiniband/hw/Makefile MAINTAINERS
	cd "$tree"

	mkdir -p include/uapi/linux
	cp "$abi" include/uapi/linux/virtio_rdma.h
	grep -q VIRTIO_ID_RDMA $ids ||
		sed -i '/define VIRTIO_ID_GPIO/a #define VIRTIO_ID_RDMA\t\t\t42 /* virtio RDMA */' $ids
	commit << 'END'
virtio: add the numbers and layouts of the RDMA device

A virtio RDMA device gives a guest verbs: queue pairs whose work queues
and completion queues are rings in the guest's memory, and a control queue
for all that makes and changes objects. This is what device and driver
share.
END

	# The private id, with its comment and the empty line behind it.
	awk '/^\/\*$/ { open = $0; next }
		open != "" && /ib_device_ops.driver_id/ { skip = 1 }
		open != "" { if (!skip) print open; open = "" }
		skip { if (/^$/) skip = 0; next }
		{ print }' "$guest/include/virtio_rdma_uapi.h" \
		> include/uapi/rdma/virtio_rdma-abi.h
	# The last of enum rdma_driver_id.
	awk '/^enum rdma_driver_id \{/ { inside = 1 }
		inside && /^\};/ { print "\tRDMA_DRIVER_VIRTIO,"; inside = 0 }
		{ print }' $drivers > "$out/changed"
	cat "$out/changed" > $drivers
	rm "$out/changed"
	commit << 'END'
RDMA/virtio: add what the driver and its provider tell each other

The driver's part of the uverbs commands, and an id for the driver.
END

	dir=drivers/infiniband/hw/virtio
	mkdir -p $dir
	for file in "$guest"/kernel/*.[ch]; do
		case $file in *.mod.c | */compat.h) continue;; esac
		newest_form < "$file" > "$dir/$(basename "$file")"
	done
	! grep -nE 'VRDMA_(HAVE|CREATE_CQ|DMABUF|DMAH|ROBUST|RESIZE)' $dir/* ||
		die "a name of compat.h has no newest form"
	sed -n 's/^virtio_rdma-y := /virtio_rdma-y := /p;/^virtio_rdma-y/,/[^\\]$/{/^virtio_rdma-y/!p}' \
		"$guest/kernel/Kbuild" > "$out/objects"
	{
		echo '# SPDX-License-Identifier: GPL-2.0'
		echo 'obj-$(CONFIG_INFINIBAND_VIRTIO) += virtio_rdma.o'
		echo
		cat "$out/objects"
	} > $dir/Makefile
	rm "$out/objects"
	cat > $dir/Kconfig << 'END'
# SPDX-License-Identifier: GPL-2.0
config INFINIBAND_VIRTIO
	tristate "Virtio RDMA device support"
	depends on VIRTIO && NETDEVICES && INET
	depends on INFINIBAND_ADDR_TRANS && INFINIBAND_USER_ACCESS
	help
	  Driver for the virtio RDMA device, by which a virtual machine uses
	  the verbs of its host: RoCE v2 between virtual machines and with
	  other machines. It needs a virtio network device with the same MAC
	  address beside it.

	  To compile this driver as a module, choose M here: the module will
	  be called virtio_rdma.
END
	before '^source "drivers/infiniband/hw/usnic/Kconfig"' drivers/infiniband/Kconfig << 'END'
source "drivers/infiniband/hw/virtio/Kconfig"
END
	echo 'obj-$(CONFIG_INFINIBAND_VIRTIO)		+= virtio/' >> drivers/infiniband/hw/Makefile
	before '^VIRTIO SOUND DRIVER' MAINTAINERS << 'END'
VIRTIO RDMA DRIVER
L:	linux-rdma@vger.kernel.org
L:	virtualization@lists.linux.dev
S:	Maintained
F:	drivers/infiniband/hw/virtio/
F:	include/uapi/linux/virtio_rdma.h
F:	include/uapi/rdma/virtio_rdma-abi.h

END
	commit << 'END'
RDMA/virtio: add a driver for the virtio RDMA device

Processes post and poll work without the kernel, in rings of their own; the
driver pins memory, makes page lists and passes commands on. The kernel's
own users, the connection manager among them, have the same rings.
END
	finish PATCH
}

# ---- rdma-core ----

rdma_core() {
	base CMakeLists.txt
	cd "$tree"
	mkdir -p providers/virtio_rdma
	cp "$abi" "$guest/include/virtio_rdma_uapi.h" "$guest"/provider/*.[ch] \
		"$guest/provider/CMakeLists.txt" providers/virtio_rdma/
	before '^add_subdirectory(providers/rxe)' CMakeLists.txt << 'END'
add_subdirectory(providers/virtio_rdma)
END
	commit << 'END'
providers: add a provider for the virtio RDMA device

The device's rings are memory of the process; posting and polling need no
system call but, when the device sleeps, one store to a notification page.
END
	finish 'PATCH rdma-core'
}

case $1 in
kernel) kernel;;
rdma-core) rdma_core;;
*) die "no such series: $1";;
esac
