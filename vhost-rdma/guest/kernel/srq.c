// SPDX-License-Identifier: GPL-2.0
/*
 * Shared receive queues. Like a receive queue, with a control block in which the device counts
 * what it took.
 */
#include <linux/log2.h>
#include "virtio_rdma.h"

static int vrdma_srq_user_ring(struct ib_device *ib, struct vrdma_wq *wq,
			       const struct virtio_rdma_srq_req *req)
{
	struct vrdma_mem *mem;

	if (!is_power_of_2(req->entries) || req->log2_stride < VIRTIO_RDMA_RQ_WQE_MIN_LOG2_STRIDE ||
	    req->log2_stride > VIRTIO_RDMA_WQE_MAX_LOG2_STRIDE)
		return -EINVAL;
	mem = vrdma_mem_user_ring(ib, req->buf, req->buf_len,
				  vrdma_ring_bytes(req->entries, req->log2_stride, true));
	if (IS_ERR(mem))
		return PTR_ERR(mem);
	wq->mem = mem;
	wq->entries = req->entries;
	wq->log2_stride = req->log2_stride;
	return 0;
}

static int vrdma_srq_ring(struct ib_srq *ibsrq, struct vrdma_srq *srq,
			  const struct ib_srq_attr *attr, struct ib_udata *udata)
{
	struct vrdma_wq_shape shape = {
		.max_wr = attr->max_wr,
		.max_sge = attr->max_sge,
		.bytes = VIRTIO_RDMA_RQ_WQE_DATA + attr->max_sge * sizeof(struct virtio_rdma_sge),
		.min_log2_stride = VIRTIO_RDMA_RQ_WQE_MIN_LOG2_STRIDE,
		.ctrl = true,
	};
	struct virtio_rdma_srq_req req;
	int ret;

	if (!udata) {
		ret = vrdma_wq_init(to_vr(ibsrq->device), &srq->rq, &shape);
		if (!ret)
			srq->ctrl = srq->rq.ring +
				    ALIGN((u64)srq->rq.entries << srq->rq.log2_stride,
					  VIRTIO_RDMA_RING_CTRL_ALIGN);
		return ret;
	}
	ret = ib_copy_validate_udata_in(udata, req, reserved);
	if (ret)
		return ret;
	if (req.entries < attr->max_wr)
		return -EINVAL;
	srq->rq.max_wr = attr->max_wr;
	srq->rq.max_sge = attr->max_sge;
	return vrdma_srq_user_ring(ibsrq->device, &srq->rq, &req);
}

static int vrdma_srq_cmd_create(struct vrdma *vr, struct vrdma_srq *srq, struct vrdma_pd *pd)
{
	struct virtio_rdma_srq_create_req req = {
		.pdn = cpu_to_le32(pd->pdn),
		.entries = cpu_to_le32(srq->rq.entries),
		.max_wr = cpu_to_le32(srq->rq.max_wr),
		.max_sge = cpu_to_le32(srq->rq.max_sge),
		.limit = cpu_to_le32(srq->limit),
		.log2_stride = srq->rq.log2_stride,
	};
	struct virtio_rdma_srq_create_resp resp;
	struct vrdma_page_list list;
	int ret;

	ret = vrdma_page_list_build(vr, &list, srq->rq.mem);
	if (!ret) {
		req.ring = list.desc;
		ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_SRQ_CREATE, srq->ctx->id, &req, sizeof(req),
				&resp, sizeof(resp));
	}
	vrdma_page_list_free(vr, &list);
	if (ret)
		return ret;
	srq->srqn = le32_to_cpu(resp.srqn);
	srq->rq.db = le32_to_cpu(resp.db);
	srq->rq.db_index = vrdma_db_index(srq->ctx, srq->rq.db);
	if (!srq->rq.db_index) {
		vrdma_failed(vr, "an SRQ has a doorbell that does not exist");
		return -EIO;
	}
	/* The slot may have served another queue; nobody posts yet. */
	virt_store_release(srq->rq.db_index, cpu_to_le32(0));
	return 0;
}

int vrdma_create_srq(struct ib_srq *ibsrq, struct ib_srq_init_attr *init, struct ib_udata *udata)
{
	struct vrdma *vr = to_vr(ibsrq->device);
	struct vrdma_srq *srq = to_vsrq(ibsrq);
	struct ib_srq_attr *attr = &init->attr;
	struct virtio_rdma_srq_resp uresp = {};
	struct ib_ucontext *ibuc = NULL;
	bool done;
	int ret;

	if (init->srq_type != IB_SRQT_BASIC)
		return -EOPNOTSUPP;
	if (!attr->max_wr || attr->max_wr > vrdma_attr32(vr->attr.max_srq_wr))
		return -EINVAL;
	if (!attr->max_sge || attr->max_sge > vrdma_attr32(vr->attr.max_srq_sge))
		return -EINVAL;
	srq->ctx = vrdma_ctx_of(vr, udata);
	srq->user = udata;
	srq->limit = attr->srq_limit;
	vrdma_ref_init(&srq->ref);
	ret = vrdma_srq_ring(ibsrq, srq, attr, udata);
	if (ret)
		return ret;
	if (udata)
		ibuc = &container_of(srq->ctx, struct vrdma_ucontext, ctx)->ibucontext;
	ret = vrdma_ctx_reserve_slots(srq->ctx, ibuc, 1);
	done = true;
	if (ret)
		goto err_ring;
	ret = vrdma_srq_cmd_create(vr, srq, to_vpd(ibsrq->pd));
	if (ret) {
		done = !vrdma_is_lost(vr);
		goto err_slots;
	}
	uresp.srqn = srq->srqn;
	uresp.db = srq->rq.db;
	if (udata)
		uresp.db_mmap = vrdma_db_mmap_offset(srq->ctx, srq->rq.db);
	if (udata)
		ret = ib_respond_udata(udata, uresp);
	if (!ret)
		ret = xa_insert_irq(&vr->srqs, srq->srqn, srq, GFP_KERNEL);
	if (!ret)
		return 0;
	done = vrdma_cmd_destroy(vr, VIRTIO_RDMA_CMD_SRQ_DESTROY, srq->ctx->id, srq->srqn);
err_slots:
	vrdma_ctx_release_slots(srq->ctx, 1);
err_ring:
	vrdma_wq_free(vr, &srq->rq, done);
	return ret;
}

/*
 * A ring of the new size comes with the command; what is posted is carried over by the device and
 * the provider.
 */
static int vrdma_srq_resize(struct vrdma *vr, struct vrdma_srq *srq,
			    struct virtio_rdma_srq_modify_req *req, u32 max_wr,
			    struct ib_udata *udata)
{
	struct vrdma_wq wq = { .max_wr = max_wr };
	struct virtio_rdma_srq_req ureq;
	struct vrdma_page_list list;
	int ret;

	ret = ib_copy_validate_udata_in(udata, ureq, reserved);
	if (ret)
		return ret;
	if (ureq.log2_stride != srq->rq.log2_stride || ureq.entries < max_wr)
		return -EINVAL;
	ret = vrdma_srq_user_ring(srq->ibsrq.device, &wq, &ureq);
	if (ret)
		return ret;
	ret = vrdma_page_list_build(vr, &list, wq.mem);
	if (!ret) {
		req->entries = cpu_to_le32(wq.entries);
		req->max_wr = cpu_to_le32(max_wr);
		req->ring = list.desc;
		ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_SRQ_MODIFY, srq->ctx->id, req, sizeof(*req),
				NULL, 0);
	}
	vrdma_page_list_free(vr, &list);
	if (ret) {
		vrdma_mem_put(vr, wq.mem, !vrdma_is_lost(vr));
		return ret;
	}
	vrdma_mem_put(vr, srq->rq.mem, true);
	srq->rq.mem = wq.mem;
	srq->rq.entries = wq.entries;
	srq->rq.max_wr = max_wr;
	return ib_respond_empty_udata(udata);
}

int vrdma_modify_srq(struct ib_srq *ibsrq, struct ib_srq_attr *attr, enum ib_srq_attr_mask mask,
		     struct ib_udata *udata)
{
	struct vrdma *vr = to_vr(ibsrq->device);
	struct vrdma_srq *srq = to_vsrq(ibsrq);
	/* IB_SRQ_* are VIRTIO_RDMA_SRQ_*. */
	struct virtio_rdma_srq_modify_req req = {
		.srqn = cpu_to_le32(srq->srqn),
		.mask = cpu_to_le32(mask),
		.limit = cpu_to_le32(attr->srq_limit),
	};
	int ret;

	if (mask & ~(IB_SRQ_MAX_WR | IB_SRQ_LIMIT))
		return -EINVAL;
	if (mask & IB_SRQ_MAX_WR) {
		if (!(vr->caps & VIRTIO_RDMA_CAP_SRQ_RESIZE) || !srq->user)
			return -EOPNOTSUPP;
		if (!attr->max_wr || attr->max_wr > vrdma_attr32(vr->attr.max_srq_wr))
			return -EINVAL;
		return vrdma_srq_resize(vr, srq, &req, attr->max_wr, udata);
	}
	if (udata) {
		ret = ib_is_udata_in_empty(udata);
		if (ret)
			return ret;
	}
	ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_SRQ_MODIFY, srq->ctx->id, &req, sizeof(req), NULL, 0);
	if (!ret && udata)
		ret = ib_respond_empty_udata(udata);
	return ret;
}

int vrdma_query_srq(struct ib_srq *ibsrq, struct ib_srq_attr *attr)
{
	struct vrdma_srq *srq = to_vsrq(ibsrq);
	struct virtio_rdma_object_req req = { .object = cpu_to_le32(srq->srqn) };
	struct virtio_rdma_srq_query_resp resp;
	int ret;

	ret = vrdma_cmd(to_vr(ibsrq->device), VIRTIO_RDMA_CMD_SRQ_QUERY, srq->ctx->id, &req,
			sizeof(req), &resp, sizeof(resp));
	if (ret)
		return ret;
	attr->max_wr = le32_to_cpu(resp.max_wr);
	attr->max_sge = le32_to_cpu(resp.max_sge);
	attr->srq_limit = le32_to_cpu(resp.limit);
	return 0;
}

int vrdma_destroy_srq(struct ib_srq *ibsrq, struct ib_udata *udata)
{
	struct vrdma *vr = to_vr(ibsrq->device);
	struct vrdma_srq *srq = to_vsrq(ibsrq);
	bool done;

	/* First: once the device has freed the number, it may be another SRQ's. */
	xa_erase_irq(&vr->srqs, srq->srqn);
	vrdma_ref_wait(&srq->ref);
	done = vrdma_cmd_destroy(vr, VIRTIO_RDMA_CMD_SRQ_DESTROY, srq->ctx->id, srq->srqn);
	vrdma_ctx_release_slots(srq->ctx, 1);
	vrdma_wq_free(vr, &srq->rq, done);
	return 0;
}
