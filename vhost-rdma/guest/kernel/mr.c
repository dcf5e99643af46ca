// SPDX-License-Identifier: GPL-2.0
/*
 * Memory regions and windows.
 *
 * A region of a process is pinned for its whole life. The address by which it is used (iova) is
 * independent of the address at which it lies; the page list tells the device the latter
 * (docs/virtio-rdma.md, section 6.2). A region of length 0 has no memory. A dma-buf is pinned
 * too: the device can not be told that its pages move. It must lie in the guest's memory, which
 * the device checks: it has no other.
 */
#include <linux/slab.h>
#include "virtio_rdma.h"

#define VRDMA_ACCESS	(IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_WRITE | \
			 IB_ACCESS_REMOTE_READ | IB_ACCESS_REMOTE_ATOMIC | IB_ACCESS_MW_BIND)

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
	ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_MR_DMA, pd->ctx->id, &req, sizeof(req), &resp,
			sizeof(resp));
	if (ret) {
		kfree(mr);
		return ERR_PTR(ret);
	}
	vrdma_mr_set_keys(mr, &resp);
	return &mr->ibmr;
}

static int vrdma_mr_reg(struct vrdma *vr, struct vrdma_mr *mr, struct vrdma_pd *pd, u64 iova,
			u64 length, int access)
{
	struct virtio_rdma_mr_reg_req req = {
		.pdn = cpu_to_le32(pd->pdn),
		.access = cpu_to_le32(access),
		.iova = cpu_to_le64(access & IB_ZERO_BASED ? 0 : iova),
		.length = cpu_to_le64(length),
	};
	struct virtio_rdma_mr_resp resp;
	struct vrdma_page_list list = {};
	int ret = 0;

	if (mr->mem)
		ret = vrdma_page_list_build(vr, &list, mr->mem);
	if (!ret) {
		req.pages = list.desc;
		ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_MR_REG, pd->ctx->id, &req, sizeof(req), &resp,
				sizeof(resp));
	}
	vrdma_page_list_free(vr, &list);
	if (!ret)
		vrdma_mr_set_keys(mr, &resp);
	return ret;
}

/* Takes `mem`, also when it fails. */
static struct vrdma_mr *vrdma_mr_of(struct ib_pd *ibpd, struct vrdma_mem *mem, u64 iova,
				    u64 length, int access)
{
	struct vrdma *vr = to_vr(ibpd->device);
	struct vrdma_mr *mr;
	int ret;

	if (IS_ERR(mem))
		return ERR_CAST(mem);
	mr = vrdma_mr_new(to_vpd(ibpd));
	if (!mr) {
		vrdma_mem_put(vr, mem, true);
		return ERR_PTR(-ENOMEM);
	}
	mr->mem = mem;
	mr->access = access;
	ret = vrdma_mr_reg(vr, mr, to_vpd(ibpd), iova, length, access);
	if (ret) {
		vrdma_mem_put(vr, mem, !vrdma_is_lost(vr));
		kfree(mr);
		return ERR_PTR(ret);
	}
	mr->ibmr.iova = iova;
	mr->ibmr.length = length;
	return mr;
}

static int vrdma_mr_check(struct vrdma *vr, int access, struct ib_udata *udata)
{
	int ret = ib_is_udata_in_empty(udata);

	return ret ? ret : vrdma_check_access(vr, access);
}

struct ib_mr *vrdma_reg_user_mr(struct ib_pd *ibpd, u64 start, u64 length, u64 iova, int access,
				VRDMA_DMAH_ARG struct ib_udata *udata)
{
	struct vrdma *vr = to_vr(ibpd->device);
	struct vrdma_mem *mem = NULL;
	struct vrdma_mr *mr;
	int ret;

	if (VRDMA_DMAH)
		return ERR_PTR(-EOPNOTSUPP);
	ret = vrdma_mr_check(vr, access, udata);
	if (ret)
		return ERR_PTR(ret);
	if (length)
		mem = vrdma_mem_user(ibpd->device, start, length, access);
	mr = vrdma_mr_of(ibpd, mem, iova, length, access);
	if (IS_ERR(mr))
		return ERR_CAST(mr);
	mr->start = start;
	ret = ib_respond_empty_udata(udata);
	if (ret) {
		vrdma_dereg_mr(&mr->ibmr, udata);
		return ERR_PTR(ret);
	}
	return &mr->ibmr;
}

struct ib_mr *vrdma_reg_user_mr_dmabuf(struct ib_pd *ibpd, u64 offset, u64 length, u64 iova,
				       int fd, int access, VRDMA_DMAH_ARG
				       VRDMA_DMABUF_ARG)
{
	struct vrdma *vr = to_vr(ibpd->device);
	struct ib_umem_dmabuf *buf;
	struct vrdma_mr *mr;
	int ret;

	if (VRDMA_DMAH)
		return ERR_PTR(-EOPNOTSUPP);
	ret = vrdma_mr_check(vr, access, VRDMA_DMABUF_UDATA);
	if (!ret && !length)
		ret = -EINVAL;
	if (ret)
		return ERR_PTR(ret);
	buf = ib_umem_dmabuf_get_pinned(ibpd->device, offset, length, fd, access);
	if (IS_ERR(buf))
		return ERR_CAST(buf);
	mr = vrdma_mr_of(ibpd, vrdma_mem_umem(&buf->umem), iova, length, access);
	if (IS_ERR(mr))
		return ERR_CAST(mr);
	mr->foreign = true;
	return &mr->ibmr;
}

struct ib_mr *vrdma_reg_dm_mr(struct ib_pd *ibpd, struct ib_dm *ibdm, struct ib_dm_mr_attr *attr,
			      struct uverbs_attr_bundle *attrs)
{
	struct vrdma *vr = to_vr(ibpd->device);
	struct vrdma_mem *mem = NULL;
	struct vrdma_mr *mr;
	int ret;

	ret = vrdma_check_access(vr, attr->access_flags);
	if (ret)
		return ERR_PTR(ret);
	/* The core has looked at the range. */
	if (attr->length)
		mem = vrdma_mem_part(vr, to_vdm(ibdm)->page, attr->offset, attr->length);
	mr = vrdma_mr_of(ibpd, mem, 0, attr->length, attr->access_flags);
	if (IS_ERR(mr))
		return ERR_CAST(mr);
	mr->foreign = true;
	return &mr->ibmr;
}

static int vrdma_mr_rereg(struct vrdma *vr, struct vrdma_mr *mr,
			  struct virtio_rdma_mr_rereg_req *req, struct vrdma_mem *mem)
{
	struct vrdma_page_list list = {};
	struct virtio_rdma_mr_resp resp;
	int ret = 0;

	if (mem)
		ret = vrdma_page_list_build(vr, &list, mem);
	if (!ret) {
		req->pages = list.desc;
		ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_MR_REREG, mr->ctx->id, req, sizeof(*req), &resp,
				sizeof(resp));
	}
	vrdma_page_list_free(vr, &list);
	if (!ret)
		vrdma_mr_set_keys(mr, &resp);
	return ret;
}

struct ib_mr *vrdma_rereg_user_mr(struct ib_mr *ibmr, int flags, u64 start, u64 length, u64 iova,
				  int access, struct ib_pd *new_pd, struct ib_udata *udata)
{
	struct vrdma *vr = to_vr(ibmr->device);
	struct vrdma_mr *mr = to_vmr(ibmr);
	struct virtio_rdma_mr_rereg_req req = { .lkey = cpu_to_le32(ibmr->lkey) };
	int use = flags & IB_MR_REREG_ACCESS ? access : mr->access;
	struct vrdma_mem *mem = NULL, *old;
	int ret;

	ret = ib_is_udata_in_empty(udata);
	if (ret)
		return ERR_PTR(ret);
	if (flags & ~IB_MR_REREG_SUPPORTED || mr->foreign)
		return ERR_PTR(-EOPNOTSUPP);
	ret = vrdma_check_access(vr, use);
	if (ret)
		return ERR_PTR(ret);
	if (!(flags & IB_MR_REREG_TRANS)) {
		start = mr->start;
		length = ibmr->length;
		iova = ibmr->iova;
		/* Pages that were pinned for reading only may be shared copies: pin again. */
		if (ib_access_writable(use) && mr->mem && !mr->mem->umem->writable)
			flags |= IB_MR_REREG_TRANS;
	}
	if (flags & IB_MR_REREG_TRANS && length) {
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
	ret = vrdma_mr_rereg(vr, mr, &req, mem);
	if (ret) {
		vrdma_mem_put(vr, mem, !vrdma_is_lost(vr));
		return ERR_PTR(ret);
	}
	if (flags & IB_MR_REREG_TRANS) {
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

	ret = vrdma_cmd_dereg(vr, mr->ctx->id, ibmr->lkey, &done);
	if (ret)
		return ret;
	vrdma_mem_put(vr, mr->mem, done);
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
	mr->mem = vrdma_mem_contiguous(vr, max_num_sg * sizeof(__le64));
	if (IS_ERR(mr->mem)) {
		ret = PTR_ERR(mr->mem);
		kfree(mr);
		return ERR_PTR(ret);
	}
	ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_MR_ALLOC, pd->ctx->id, &req, sizeof(req), &resp,
			sizeof(resp));
	if (ret) {
		vrdma_mem_put(vr, mr->mem, true);
		kfree(mr);
		return ERR_PTR(ret);
	}
	mr->ibmr.lkey = le32_to_cpu(resp.object);
	mr->ibmr.rkey = mr->ibmr.lkey;
	return &mr->ibmr;
}

static int vrdma_set_page(struct ib_mr *ibmr, u64 addr)
{
	struct vrdma_mr *mr = to_vmr(ibmr);
	__le64 *pages = mr->mem->vaddr;

	if (mr->page_count >= mr->max_pages)
		return -ENOMEM;
	pages[mr->page_count++] = cpu_to_le64(addr);
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
	struct virtio_rdma_mw_alloc_req req = { .pdn = cpu_to_le32(pd->pdn) };
	bool type1 = ibmw->type == IB_MW_TYPE_1;
	struct virtio_rdma_object_resp resp;
	int ret;

	if (udata) {
		ret = ib_is_udata_in_empty(udata);
		if (ret)
			return ret;
	}
	if (!(vr->caps & (type1 ? VIRTIO_RDMA_CAP_MW_TYPE1 : VIRTIO_RDMA_CAP_MW_TYPE2)))
		return -EOPNOTSUPP;
	req.type = cpu_to_le32(type1 ? VIRTIO_RDMA_MW_TYPE1 : VIRTIO_RDMA_MW_TYPE2);
	mw->ctx = pd->ctx;
	ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_MW_ALLOC, pd->ctx->id, &req, sizeof(req), &resp,
			sizeof(resp));
	if (!ret)
		ibmw->rkey = le32_to_cpu(resp.object);
	return ret;
}

int vrdma_dealloc_mw(struct ib_mw *ibmw)
{
	vrdma_cmd_destroy(to_vr(ibmw->device), VIRTIO_RDMA_CMD_MW_DEALLOC, to_vmw(ibmw)->ctx->id,
			  ibmw->rkey);
	return 0;
}
