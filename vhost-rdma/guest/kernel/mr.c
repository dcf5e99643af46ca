// SPDX-License-Identifier: GPL-2.0
/*
 * Memory regions and windows.
 *
 * A region of a process is pinned for its whole life. The address by which it is used (iova) is independent of the address at which it lies; the page list tells
 * the device the latter (docs/virtio-rdma.md, section 6.2).
 */
#include <linux/slab.h>
#include "virtio_rdma.h"

#define VRDMA_ACCESS	(IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_WRITE | IB_ACCESS_REMOTE_READ | \
			 IB_ACCESS_REMOTE_ATOMIC | IB_ACCESS_MW_BIND)

static int vrdma_check_access(struct vrdma *vr, int access)
{
	int known = VRDMA_ACCESS | (int)VIRTIO_RDMA_ACCESS_OPTIONAL_MASK;

	if (vr->caps & VIRTIO_RDMA_CAP_ZERO_BASED)
		known |= IB_ZERO_BASED;
	if (vr->caps & VIRTIO_RDMA_CAP_FLUSH)
		known |= VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL;
	return access & ~known ? -EOPNOTSUPP : 0;
}

static struct vrdma_mr *vrdma_mr_new(struct vrdma_pd *pd)
{
	struct vrdma_mr *mr = kzalloc(sizeof(*mr), GFP_KERNEL);

	if (mr)
		mr->ctx = pd->ctx;
	return mr;
}

static void vrdma_mr_set_keys(struct vrdma_mr *mr, const struct virtio_rdma_mr_resp *resp)
{
	mr->ibmr.lkey = le32_to_cpu(resp->lkey);
	mr->ibmr.rkey = le32_to_cpu(resp->rkey);
}

struct ib_mr *vrdma_get_dma_mr(struct ib_pd *ibpd, int access)
{
	struct vrdma *vr = to_vr(ibpd->device);
	struct vrdma_pd *pd = to_vpd(ibpd);
	struct virtio_rdma_mr_dma_req req = {
		.pdn = cpu_to_le32(pd->pdn),
		.access = cpu_to_le32(access),
	};
	struct virtio_rdma_mr_resp resp;
	struct vrdma_mr *mr;
	int ret;

	mr = vrdma_mr_new(pd);
	if (!mr)
		return ERR_PTR(-ENOMEM);
	ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_MR_DMA, pd->ctx->id, &req, sizeof(req), &resp, sizeof(resp));
	if (ret) {
		kfree(mr);
		return ERR_PTR(ret);
	}
	vrdma_mr_set_keys(mr, &resp);
	return &mr->ibmr;
}

static int vrdma_mr_reg(struct vrdma *vr, struct vrdma_mr *mr, struct vrdma_pd *pd, u64 iova, u64 length,
			int access)
{
	struct virtio_rdma_mr_reg_req req = {
		.pdn = cpu_to_le32(pd->pdn),
		.access = cpu_to_le32(access),
		.iova = cpu_to_le64(access & IB_ZERO_BASED ? 0 : iova),
		.length = cpu_to_le64(length),
	};
	struct virtio_rdma_mr_resp resp;
	struct vrdma_page_list list;
	int ret;

	ret = vrdma_page_list_build(&list, mr->mem, length);
	if (!ret) {
		req.pages = list.desc;
		ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_MR_REG, pd->ctx->id, &req, sizeof(req), &resp, sizeof(resp));
	}
	vrdma_page_list_free(vr, &list);
	if (!ret)
		vrdma_mr_set_keys(mr, &resp);
	return ret;
}

#ifdef VRDMA_HAVE_DMAH
struct ib_mr *vrdma_reg_user_mr(struct ib_pd *ibpd, u64 start, u64 length, u64 iova, int access,
				struct ib_dmah *dmah, struct ib_udata *udata)
#else
struct ib_mr *vrdma_reg_user_mr(struct ib_pd *ibpd, u64 start, u64 length, u64 iova, int access,
				struct ib_udata *udata)
#endif
{
	struct vrdma *vr = to_vr(ibpd->device);
	struct vrdma_mr *mr;
	int ret;

#ifdef VRDMA_HAVE_DMAH
	if (dmah)
		return ERR_PTR(-EOPNOTSUPP);
#endif
	if (!length)
		return ERR_PTR(-EINVAL);
	ret = vrdma_check_access(vr, access);
	if (ret)
		return ERR_PTR(ret);
	mr = vrdma_mr_new(to_vpd(ibpd));
	if (!mr)
		return ERR_PTR(-ENOMEM);
	mr->mem = vrdma_mem_user(ibpd->device, start, length, access);
	if (IS_ERR(mr->mem)) {
		ret = PTR_ERR(mr->mem);
		kfree(mr);
		return ERR_PTR(ret);
	}
	mr->start = start;
	mr->access = access;
	ret = vrdma_mr_reg(vr, mr, to_vpd(ibpd), iova, length, access);
	if (ret) {
		vrdma_mem_put(vr, mr->mem, !vrdma_is_lost(vr));
		kfree(mr);
		return ERR_PTR(ret);
	}
	mr->ibmr.iova = iova;
	mr->ibmr.length = length;
	return &mr->ibmr;
}

static int vrdma_mr_rereg(struct vrdma *vr, struct vrdma_mr *mr, struct virtio_rdma_mr_rereg_req *req,
			  struct vrdma_mem *mem, u64 length)
{
	struct vrdma_page_list list = {};
	struct virtio_rdma_mr_resp resp;
	int ret = 0;

	if (mem)
		ret = vrdma_page_list_build(&list, mem, length);
	if (!ret) {
		req->pages = list.desc;
		ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_MR_REREG, mr->ctx->id, req, sizeof(*req), &resp, sizeof(resp));
	}
	vrdma_page_list_free(vr, &list);
	if (!ret)
		vrdma_mr_set_keys(mr, &resp);
	return ret;
}

struct ib_mr *vrdma_rereg_user_mr(struct ib_mr *ibmr, int flags, u64 start, u64 length, u64 iova, int access,
				  struct ib_pd *new_pd, struct ib_udata *udata)
{
	struct vrdma *vr = to_vr(ibmr->device);
	struct vrdma_mr *mr = to_vmr(ibmr);
	struct virtio_rdma_mr_rereg_req req = { .lkey = cpu_to_le32(ibmr->lkey) };
	int use = flags & IB_MR_REREG_ACCESS ? access : mr->access;
	struct vrdma_mem *mem = NULL, *old;
	int ret;

	if (flags & ~IB_MR_REREG_SUPPORTED || !mr->mem)
		return ERR_PTR(-EOPNOTSUPP);
	ret = vrdma_check_access(vr, use);
	if (ret)
		return ERR_PTR(ret);
	if (!(flags & IB_MR_REREG_TRANS)) {
		start = mr->start;
		length = ibmr->length;
		iova = ibmr->iova;
		/* Pages that were pinned for reading only may be shared copies: pin again. */
		if (ib_access_writable(use) && !mr->mem->umem->writable)
			flags |= IB_MR_REREG_TRANS;
	}
	if (!length)
		return ERR_PTR(-EINVAL);
	if (flags & IB_MR_REREG_TRANS) {
		mem = vrdma_mem_user(ibmr->device, start, length, use);
		if (IS_ERR(mem))
			return ERR_CAST(mem);
	}
	/* IB_MR_REREG_* are VIRTIO_RDMA_REREG_*. */
	req.flags = cpu_to_le32(flags);
	req.pdn = cpu_to_le32(new_pd ? to_vpd(new_pd)->pdn : to_vpd(ibmr->pd)->pdn);
	req.access = cpu_to_le32(use);
	req.iova = cpu_to_le64(use & IB_ZERO_BASED ? 0 : iova);
	req.length = cpu_to_le64(length);
	ret = vrdma_mr_rereg(vr, mr, &req, mem, length);
	if (ret) {
		vrdma_mem_put(vr, mem, !vrdma_is_lost(vr));
		return ERR_PTR(ret);
	}
	if (mem) {
		old = mr->mem;
		mr->mem = mem;
		mr->start = start;
		vrdma_mem_put(vr, old, true);
	}
	mr->access = use;
	return NULL;
}

int vrdma_dereg_mr(struct ib_mr *ibmr, struct ib_udata *udata)
{
	struct vrdma *vr = to_vr(ibmr->device);
	struct vrdma_mr *mr = to_vmr(ibmr);
	bool done;
	int ret;

	ret = vrdma_cmd_destroy(vr, VIRTIO_RDMA_CMD_MR_DEREG, mr->ctx->id, ibmr->lkey, &done);
	if (ret)
		return ret;
	vrdma_mem_put(vr, mr->mem, done);
	if (done)
		kfree(mr->page_array);
	kfree(mr);
	return 0;
}

/* ---- Fast-register regions ---- */

struct ib_mr *vrdma_alloc_mr(struct ib_pd *ibpd, enum ib_mr_type type, u32 max_num_sg)
{
	struct vrdma *vr = to_vr(ibpd->device);
	struct vrdma_pd *pd = to_vpd(ibpd);
	struct virtio_rdma_mr_alloc_req req = {
		.pdn = cpu_to_le32(pd->pdn),
		.max_pages = cpu_to_le32(max_num_sg),
	};
	struct virtio_rdma_object_resp resp;
	struct vrdma_mr *mr;
	int ret;

	if (type != IB_MR_TYPE_MEM_REG)
		return ERR_PTR(-EOPNOTSUPP);
	if (!max_num_sg || max_num_sg > vrdma_attr32(vr->attr.max_fast_reg_pages))
		return ERR_PTR(-EINVAL);
	mr = vrdma_mr_new(pd);
	if (!mr)
		return ERR_PTR(-ENOMEM);
	mr->max_pages = max_num_sg;
	mr->page_array = kcalloc(max_num_sg, sizeof(*mr->page_array), GFP_KERNEL);
	ret = -ENOMEM;
	if (!mr->page_array)
		goto err;
	ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_MR_ALLOC, pd->ctx->id, &req, sizeof(req), &resp, sizeof(resp));
	if (ret)
		goto err;
	mr->ibmr.lkey = le32_to_cpu(resp.object);
	mr->ibmr.rkey = mr->ibmr.lkey;
	return &mr->ibmr;
err:
	kfree(mr->page_array);
	kfree(mr);
	return ERR_PTR(ret);
}

static int vrdma_set_page(struct ib_mr *ibmr, u64 addr)
{
	struct vrdma_mr *mr = to_vmr(ibmr);

	if (mr->page_count >= mr->max_pages)
		return -ENOMEM;
	mr->page_array[mr->page_count++] = cpu_to_le64(addr);
	return 0;
}

int vrdma_map_mr_sg(struct ib_mr *ibmr, struct scatterlist *sg, int nents, unsigned int *offset)
{
	to_vmr(ibmr)->page_count = 0;
	return ib_sg_to_pages(ibmr, sg, nents, offset, vrdma_set_page);
}

/* ---- Windows ---- */

int vrdma_alloc_mw(struct ib_mw *ibmw, struct ib_udata *udata)
{
	struct vrdma *vr = to_vr(ibmw->device);
	struct vrdma_mw *mw = to_vmw(ibmw);
	struct vrdma_pd *pd = to_vpd(ibmw->pd);
	u64 need = ibmw->type == IB_MW_TYPE_1 ? VIRTIO_RDMA_CAP_MW_TYPE1 : VIRTIO_RDMA_CAP_MW_TYPE2;
	struct virtio_rdma_mw_alloc_req req = {
		.pdn = cpu_to_le32(pd->pdn),
		.type = cpu_to_le32(ibmw->type == IB_MW_TYPE_1 ? VIRTIO_RDMA_MW_TYPE1 : VIRTIO_RDMA_MW_TYPE2),
	};
	struct virtio_rdma_object_resp resp;
	int ret;

	if (!(vr->caps & need))
		return -EOPNOTSUPP;
	mw->ctx = pd->ctx;
	ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_MW_ALLOC, pd->ctx->id, &req, sizeof(req), &resp, sizeof(resp));
	if (!ret)
		ibmw->rkey = le32_to_cpu(resp.object);
	return ret;
}

int vrdma_dealloc_mw(struct ib_mw *ibmw)
{
	bool done;

	return vrdma_cmd_destroy(to_vr(ibmw->device), VIRTIO_RDMA_CMD_MW_DEALLOC, to_vmw(ibmw)->ctx->id, ibmw->rkey,
				 &done);
}
