// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * Memory regions and windows, as kernel.c has the other objects. Memory of a program is reached as
 * it is where it is shared, and by a shadow where it is not (private.h).
 */
#define VRDMA_KERNEL_ITSELF
#include "kernel.h"

#include "loan.h"
#include "private.h"
#include "session.h"
#include "virtio_rdma.h"

static int reg_mr(struct ibv_pd *pd, void *addr, size_t length, uint64_t hca_va, int access,
		  struct verbs_mr *vmr, int *again)
{
	struct vrdma_session *session = vrdma_session_of(pd->context);
	uint64_t iova = access & IBV_ACCESS_ZERO_BASED ? 0 : hca_va;
	struct virtio_rdma_mr_reg_req req = { .pdn = htole32(pd->handle), .iova = htole64(iova) };
	struct virtio_rdma_mr_resp made;
	struct vrdma_cover cover;
	int ret = vrdma_cover(session, addr, length, access, &cover);

	if (ret)
		return ret;
	/* What does not say that it is optional and is not known is refused by the device. */
	req.access = htole32(cover.access);
	req.length = htole64(cover.length);
	req.pages = cover.pages;
	ret = vrdma_command(pd->context, VIRTIO_RDMA_CMD_MR_REG, &req, sizeof(req), &made,
			    sizeof(made));
	if (ret) {
		*again = cover.loan && ret == EFAULT;
		if (*again)
			vrdma_loan_gone(session, cover.loan);
		vrdma_cover_drop(session, &cover);
		return ret;
	}
	ret = vrdma_cover_keep(session, &cover, le32toh(made.lkey), iova);
	if (ret) {
		vrdma_destroy(pd->context, VIRTIO_RDMA_CMD_MR_DEREG, le32toh(made.lkey));
		vrdma_cover_drop(session, &cover);
		return ret;
	}
	vmr->ibv_mr.handle = le32toh(made.lkey);
	vmr->ibv_mr.lkey = le32toh(made.lkey);
	vmr->ibv_mr.rkey = le32toh(made.rkey);
	vmr->ibv_mr.context = pd->context;
	vmr->mr_type = IBV_MR_TYPE_MR;
	vmr->access = access;
	return 0;
}

int vrdma_local_reg_mr(struct ibv_pd *pd, void *addr, size_t length, uint64_t hca_va, int access,
		       struct verbs_mr *vmr, struct ibv_reg_mr *cmd, size_t cmd_size,
		       struct ib_uverbs_reg_mr_resp *resp, size_t resp_size)
{
	int again = 0, ret = reg_mr(pd, addr, length, hca_va, access, vmr, &again);

	/* What was lent before may be cut off; what is there now is not. */
	return again ? reg_mr(pd, addr, length, hca_va, access, vmr, &again) : ret;
}

int vrdma_local_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova,
			      int fd, int access, struct verbs_mr *vmr, void *driver)
{
	return EOPNOTSUPP;
}

/*
 * A shadow is that of one memory (4.7), and so is a loan: where either comes or goes the region is
 * made anew.
 */
static int remake_mr(struct verbs_mr *vmr, void *addr, size_t length, uint64_t hca_va, int access,
		     struct ibv_pd *pd)
{
	struct vrdma_session *session = vrdma_session_of(pd->context);
	struct verbs_mr made = {};
	int ret = vrdma_local_reg_mr(pd, addr, length, hca_va, access, &made, NULL, 0, NULL, 0);

	if (ret)
		return ret;
	ret = vrdma_destroy(pd->context, VIRTIO_RDMA_CMD_MR_DEREG, vmr->ibv_mr.lkey);
	if (ret) {
		vrdma_local_dereg_mr(&made);
		return ret;
	}
	vrdma_lent_forget(session, vmr->ibv_mr.lkey);
	vrdma_private_forget(session, vmr->ibv_mr.lkey);
	vmr->ibv_mr.handle = made.ibv_mr.handle;
	vmr->ibv_mr.lkey = made.ibv_mr.lkey;
	vmr->ibv_mr.rkey = made.ibv_mr.rkey;
	vmr->ibv_mr.context = pd->context;
	return 0;
}

int vrdma_local_rereg_mr(struct verbs_mr *vmr, uint32_t flags, void *addr, size_t length,
			 uint64_t hca_va, int access, struct ibv_pd *pd, struct ibv_rereg_mr *cmd,
			 size_t cmd_sz, struct ib_uverbs_rereg_mr_resp *resp, size_t resp_sz)
{
	struct ibv_context *context = vmr->ibv_mr.context;
	struct vrdma_session *session = vrdma_session_of(context);
	int is_private = vrdma_is_private(session, vmr->ibv_mr.lkey);
	int is_own = !is_private && !vrdma_is_lent(session, vmr->ibv_mr.lkey);
	struct virtio_rdma_mr_rereg_req req = {
		.lkey = htole32(vmr->ibv_mr.lkey),
		.flags = htole32(flags),
		.pdn = htole32(pd ? pd->handle : 0),
		.iova = htole64(hca_va),
		.length = htole64(length),
	};
	struct virtio_rdma_mr_resp made;
	struct vrdma_cover cover = {};
	int ret = 0;

	if (!(flags & IBV_REREG_MR_CHANGE_ACCESS))
		access = vmr->access;
	if (flags & IBV_REREG_MR_CHANGE_TRANSLATION && is_own)
		ret = vrdma_cover(session, addr, length, access, &cover);
	if (ret)
		return ret;
	vrdma_cover_drop(session, &cover);
	if (flags & IBV_REREG_MR_CHANGE_TRANSLATION && (!is_own || cover.region || cover.loan))
		return remake_mr(vmr, addr, length, hca_va, access,
				 flags & IBV_REREG_MR_CHANGE_PD ? pd : vmr->ibv_mr.pd);
	req.pages = cover.pages;
	req.access = htole32((uint32_t)access | (is_private ? VIRTIO_RDMA_ACCESS_MIRRORED : 0));
	ret = vrdma_command(context, VIRTIO_RDMA_CMD_MR_REREG, &req, sizeof(req), &made,
			    sizeof(made));
	if (ret)
		return ret;
	vmr->ibv_mr.lkey = le32toh(made.lkey);
	vmr->ibv_mr.rkey = le32toh(made.rkey);
	if (flags & IBV_REREG_MR_CHANGE_PD)
		vmr->ibv_mr.context = pd->context;
	return 0;
}

int vrdma_local_dereg_mr(struct verbs_mr *vmr)
{
	const struct ibv_context *context = vmr->ibv_mr.context;
	int ret = vrdma_destroy(vmr->ibv_mr.context, VIRTIO_RDMA_CMD_MR_DEREG, vmr->ibv_mr.lkey);

	if (!ret) {
		vrdma_dm_forget(context, vmr->ibv_mr.lkey);
		vrdma_lent_forget(vrdma_session_of(vmr->ibv_mr.context), vmr->ibv_mr.lkey);
		vrdma_private_forget(vrdma_session_of(vmr->ibv_mr.context), vmr->ibv_mr.lkey);
	}
	return ret;
}

int vrdma_local_query_mr(struct ibv_pd *pd, struct verbs_mr *vmr, uint32_t handle)
{
	return EOPNOTSUPP;
}

int vrdma_local_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type, struct ibv_mw *mw,
			 struct ibv_alloc_mw *cmd, size_t cmd_size,
			 struct ib_uverbs_alloc_mw_resp *resp, size_t resp_size)
{
	struct virtio_rdma_mw_alloc_req req = { .pdn = htole32(pd->handle), .type = htole32(type) };
	struct virtio_rdma_object_resp made;
	int ret = vrdma_command(pd->context, VIRTIO_RDMA_CMD_MW_ALLOC, &req, sizeof(req), &made,
				sizeof(made));

	if (ret)
		return ret;
	mw->context = pd->context;
	mw->pd = pd;
	mw->rkey = le32toh(made.object);
	mw->handle = mw->rkey;
	mw->type = type;
	return 0;
}

int vrdma_local_dealloc_mw(struct ibv_mw *mw)
{
	return vrdma_destroy(mw->context, VIRTIO_RDMA_CMD_MW_DEALLOC, mw->handle);
}
