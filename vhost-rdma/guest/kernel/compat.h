/* SPDX-License-Identifier: GPL-2.0 */
/*
 * One source for kernels 6.1 to 7.2: every difference between them is here, and nowhere else.
 *
 * Version numbers are those of the first release with the change; VRDMA_HAVE_* that could not be tied to a release are found by Kbuild, which
 * looks into the headers.
 */
#ifndef VIRTIO_RDMA_COMPAT_H
#define VIRTIO_RDMA_COMPAT_H

#include <linux/mm.h>
#include <linux/version.h>
#include <linux/virtio_config.h>
#include <rdma/ib_umem.h>
#include <rdma/ib_verbs.h>
#if __has_include(<rdma/iter.h>)
#include <rdma/iter.h>
#endif
#include <rdma/uverbs_ioctl.h>

/* 6.11: create_cq got the attribute bundle instead of the udata. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 11, 0)
#define VRDMA_CREATE_CQ_ARG	struct uverbs_attr_bundle *attrs
#define VRDMA_CQ_UDATA		(attrs ? &attrs->driver_udata : NULL)
#else
#define VRDMA_CREATE_CQ_ARG	struct ib_udata *udata_arg
#define VRDMA_CQ_UDATA		udata_arg
#endif

#ifdef VRDMA_HAVE_RESIZE_USER_CQ
#define VRDMA_RESIZE_CQE	unsigned int
#define VRDMA_RESIZE_CQ_OP	.resize_user_cq
#else
#define VRDMA_RESIZE_CQE	int
#define VRDMA_RESIZE_CQ_OP	.resize_cq
#endif

#ifdef VRDMA_HAVE_UMEM_GET_VA
#define vrdma_umem_get		ib_umem_get_va
#else
#define vrdma_umem_get		ib_umem_get
#endif

/* 6.2: FLUSH and atomic writes in the interface. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 2, 0)
#define VRDMA_FLUSH_FLAGS	IB_DEVICE_FLUSH_GLOBAL
#define VRDMA_ATOMIC_WRITE_FLAGS	IB_DEVICE_ATOMIC_WRITE
#else
#define VRDMA_FLUSH_FLAGS	0
#define VRDMA_ATOMIC_WRITE_FLAGS	0
#endif

/* 6.4 named the bit. */
#ifndef VIRTIO_F_NOTIFICATION_DATA
#define VIRTIO_F_NOTIFICATION_DATA	38
#endif

/* 6.3: vm_flags became read-only outside mm. */
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 3, 0)
static inline void vrdma_vm_flags_mod(struct vm_area_struct *vma, vm_flags_t set, vm_flags_t clear)
{
	vma->vm_flags = (vma->vm_flags | set) & ~clear;
}
#else
#define vrdma_vm_flags_mod	vm_flags_mod
#endif

/* 6.11: virtio_find_vqs takes one array of virtqueue_info. */
static inline int vrdma_find_vqs(struct virtio_device *vdev, unsigned int n, struct virtqueue **vqs,
				 vq_callback_t **callbacks, const char **names)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 11, 0)
	struct virtqueue_info *info;
	unsigned int i;
	int ret;

	info = kcalloc(n, sizeof(*info), GFP_KERNEL);
	if (!info)
		return -ENOMEM;
	for (i = 0; i < n; i++) {
		info[i].name = names[i];
		info[i].callback = callbacks[i];
	}
	ret = virtio_find_vqs(vdev, n, vqs, info, NULL);
	kfree(info);
	return ret;
#else
	return virtio_find_vqs(vdev, n, vqs, callbacks, names, NULL);
#endif
}

#endif /* VIRTIO_RDMA_COMPAT_H */
