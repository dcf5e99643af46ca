/* SPDX-License-Identifier: GPL-2.0 */
/*
 * One source for kernels 6.1 to 7.2: every difference between them is here, and nowhere else.
 *
 * Version numbers are those of the first release with the change; VRDMA_HAVE_* that could not be
 * tied to a release are found by Kbuild, which looks into the headers. In a kernel tree this file
 * is not there: upstream/make-series.sh puts the newest form in place of each name.
 */
#ifndef VIRTIO_RDMA_COMPAT_H
#define VIRTIO_RDMA_COMPAT_H

#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/version.h>
#include <linux/virtio_config.h>
#include <rdma/ib_umem.h>
#include <rdma/ib_verbs.h>
#ifdef VRDMA_HAVE_ITER
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

/* 6.12: reg_user_mr_dmabuf got it too. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 12, 0)
#define VRDMA_DMABUF_ARG	struct uverbs_attr_bundle *attrs
#define VRDMA_DMABUF_UDATA	(&attrs->driver_udata)
#else
#define VRDMA_DMABUF_ARG	struct ib_udata *udata
#define VRDMA_DMABUF_UDATA	udata
#endif

/* Hints of steering tags for a region; we have none. */
#ifdef VRDMA_HAVE_DMAH
#define VRDMA_DMAH_ARG		struct ib_dmah *dmah,
#define VRDMA_DMAH		dmah
#else
#define VRDMA_DMAH_ARG
#define VRDMA_DMAH		false
#endif

/*
 * The rules for the driver's part of a command, which newer kernels have functions for: a longer
 * request is accepted if what we do not know is zero, an answer is cut or filled with zeroes.
 */
#ifdef VRDMA_HAVE_ROBUST_UDATA
#define VRDMA_ROBUST_UDATA	.uverbs_robust_udata = 1,
#else
#define VRDMA_ROBUST_UDATA
static inline int vrdma_udata_in(struct ib_udata *udata, void *req, size_t size, size_t least)
{
	memset(req, 0, size);
	if (udata->inlen < least)
		return -EINVAL;
	if (udata->inlen > size && !ib_is_udata_cleared(udata, size, udata->inlen - size))
		return -EOPNOTSUPP;
	return ib_copy_from_udata(req, udata, min(size, udata->inlen));
}

static inline int vrdma_udata_out(struct ib_udata *udata, const void *resp, size_t size)
{
	size_t len = min(size, udata->outlen);

	if (len && ib_copy_to_udata(udata, (void *)resp, len))
		return -EFAULT;
	if (udata->outlen > len && clear_user(udata->outbuf + len, udata->outlen - len))
		return -EFAULT;
	return 0;
}

static inline int ib_is_udata_in_empty(struct ib_udata *udata)
{
	if (udata->inlen && !ib_is_udata_cleared(udata, 0, udata->inlen))
		return -EOPNOTSUPP;
	return 0;
}

#define ib_copy_validate_udata_in(udata, req, last) \
	vrdma_udata_in(udata, &(req), sizeof(req), offsetofend(typeof(req), last))
#define ib_respond_udata(udata, resp)	vrdma_udata_out(udata, &(resp), sizeof(resp))
#define ib_respond_empty_udata(udata)	vrdma_udata_out(udata, NULL, 0)
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
#define VRDMA_HAVE_ATOMIC_WRITE
#else
#define VRDMA_FLUSH_FLAGS	0
#define VRDMA_ATOMIC_WRITE_FLAGS	0
#endif

/* Not one of the enum's: see virtio_rdma_uapi.h. */
#define VRDMA_DRIVER_ID	((enum rdma_driver_id)VIRTIO_RDMA_DRIVER_ID)

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
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 11, 0)
#define vrdma_find_vqs(vdev, n, vqs, info)	virtio_find_vqs(vdev, n, vqs, info, NULL)
#else
struct virtqueue_info {
	const char *name;
	vq_callback_t *callback;
};

static inline int vrdma_find_vqs(struct virtio_device *vdev, unsigned int n,
				 struct virtqueue **vqs, const struct virtqueue_info *info)
{
	vq_callback_t **callbacks = kcalloc(n, sizeof(*callbacks), GFP_KERNEL);
	const char **names = kcalloc(n, sizeof(*names), GFP_KERNEL);
	unsigned int i;
	int ret = -ENOMEM;

	if (callbacks && names) {
		for (i = 0; i < n; i++) {
			names[i] = info[i].name;
			callbacks[i] = info[i].callback;
		}
		ret = virtio_find_vqs(vdev, n, vqs, callbacks, names, NULL);
	}
	kfree(callbacks);
	kfree(names);
	return ret;
}
#endif

#endif /* VIRTIO_RDMA_COMPAT_H */
