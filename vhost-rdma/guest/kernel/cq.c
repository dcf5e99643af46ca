// SPDX-License-Identifier: GPL-2.0
/*
 * Completion queues: their life. What happens in the rings is in poll.c (kernel) and in the
 * provider (processes).
 */
#include <linux/log2.h>
#include <linux/slab.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include "virtio_rdma.h"

static int vrdma_cq_memory(struct ib_cq *ibcq, struct ib_udata *udata, u32 asked, u32 *entries,
			   struct vrdma_mem **mem)
{
	struct virtio_rdma_cq_req req;
	int ret;

	if (!udata) {
		*entries = roundup_pow_of_two(asked);
		*mem = vrdma_mem_kernel(to_vr(ibcq->device),
					vrdma_ring_bytes(*entries, VIRTIO_RDMA_CQE_LOG2_STRIDE,
							 true));
		return PTR_ERR_OR_ZERO(*mem);
	}
	ret = ib_copy_validate_udata_in(udata, req, entries);
	if (ret)
		return ret;
	if (!is_power_of_2(req.entries) || req.entries < asked)
		return -EINVAL;
	*entries = req.entries;
	*mem = vrdma_mem_user_ring(ibcq->device, req.buf, req.buf_len,
				   vrdma_ring_bytes(req.entries, VIRTIO_RDMA_CQE_LOG2_STRIDE,
						    true));
	return PTR_ERR_OR_ZERO(*mem);
}

static int vrdma_cq_cmd_create(struct vrdma *vr, struct vrdma_cq *cq, u32 vector)
{
	struct virtio_rdma_cq_create_req req = {
		.entries = cpu_to_le32(cq->entries),
		.vector = cpu_to_le32(vector),
	};
	struct virtio_rdma_object_resp resp;
	struct vrdma_page_list list;
	int ret;

	ret = vrdma_page_list_build(vr, &list, cq->mem);
	if (!ret) {
		req.ring = list.desc;
		ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_CQ_CREATE, cq->ctx->id, &req, sizeof(req),
				&resp, sizeof(resp));
	}
	vrdma_page_list_free(vr, &list);
	if (!ret)
		cq->cqn = le32_to_cpu(resp.object);
	return ret;
}

int vrdma_create_cq(struct ib_cq *ibcq, const struct ib_cq_init_attr *attr,
		    VRDMA_CREATE_CQ_ARG)
{
	struct ib_udata *udata = VRDMA_CQ_UDATA;
	struct vrdma *vr = to_vr(ibcq->device);
	struct vrdma_cq *cq = to_vcq(ibcq);
	struct virtio_rdma_cq_resp uresp = {};
	bool done;
	int ret;

	if (attr->flags & ~IB_UVERBS_CQ_FLAGS_TIMESTAMP_COMPLETION)
		return -EOPNOTSUPP;
	if (!attr->cqe || attr->cqe > vrdma_attr32(vr->attr.max_cqe) ||
	    attr->comp_vector >= vr->num_comp)
		return -EINVAL;
	cq->ctx = vrdma_ctx_of(vr, udata);
	spin_lock_init(&cq->lock);
	INIT_LIST_HEAD(&cq->send_qps);
	INIT_LIST_HEAD(&cq->recv_qps);
	vrdma_ref_init(&cq->ref);
	ret = vrdma_cq_memory(ibcq, udata, attr->cqe, &cq->entries, &cq->mem);
	if (ret)
		return ret;
	if (!udata) {
		cq->ring = cq->mem->vaddr;
		cq->ctrl = cq->ring + ALIGN((u64)cq->entries << VIRTIO_RDMA_CQE_LOG2_STRIDE,
					    VIRTIO_RDMA_RING_CTRL_ALIGN);
	}
	ret = vrdma_cq_cmd_create(vr, cq, attr->comp_vector);
	if (ret) {
		vrdma_mem_put(vr, cq->mem, !vrdma_is_lost(vr));
		return ret;
	}
	ibcq->cqe = cq->entries;
	uresp.cqn = cq->cqn;
	if (udata)
		ret = ib_respond_udata(udata, uresp);
	if (!ret)
		ret = xa_insert_irq(&vr->cqs, cq->cqn, cq, GFP_KERNEL);
	if (ret) {
		done = vrdma_cmd_destroy(vr, VIRTIO_RDMA_CMD_CQ_DESTROY, cq->ctx->id, cq->cqn);
		vrdma_mem_put(vr, cq->mem, done);
	}
	return ret;
}

int vrdma_destroy_cq(struct ib_cq *ibcq, struct ib_udata *udata)
{
	struct vrdma *vr = to_vr(ibcq->device);
	struct vrdma_cq *cq = to_vcq(ibcq);
	bool done;

	/* First: once the device has freed the number, it may be another CQ's. */
	xa_erase_irq(&vr->cqs, cq->cqn);
	vrdma_ref_wait(&cq->ref);
	done = vrdma_cmd_destroy(vr, VIRTIO_RDMA_CMD_CQ_DESTROY, cq->ctx->id, cq->cqn);
	vrdma_mem_put(vr, cq->mem, done);
	return 0;
}

/* Processes only: the core resizes no other CQ. The provider holds its lock over the command. */
int vrdma_resize_cq(struct ib_cq *ibcq, VRDMA_RESIZE_CQE cqe, struct ib_udata *udata)
{
	struct vrdma *vr = to_vr(ibcq->device);
	struct vrdma_cq *cq = to_vcq(ibcq);
	struct virtio_rdma_cq_resize_req req = {};
	struct vrdma_page_list list;
	struct vrdma_mem *mem;
	u32 entries;
	int ret;

	if (!udata || cqe < 1 || cqe > vrdma_attr32(vr->attr.max_cqe))
		return -EINVAL;
	ret = vrdma_cq_memory(ibcq, udata, cqe, &entries, &mem);
	if (ret)
		return ret;
	ret = vrdma_page_list_build(vr, &list, mem);
	if (!ret) {
		req.cqn = cpu_to_le32(cq->cqn);
		req.entries = cpu_to_le32(entries);
		req.requested = cpu_to_le32(cqe);
		req.ring = list.desc;
		ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_CQ_RESIZE, cq->ctx->id, &req, sizeof(req),
				NULL, 0);
	}
	vrdma_page_list_free(vr, &list);
	if (ret) {
		vrdma_mem_put(vr, mem, !vrdma_is_lost(vr));
		return ret;
	}
	swap(cq->mem, mem);
	cq->entries = entries;
	ibcq->cqe = entries;
	vrdma_mem_put(vr, mem, true);
	return ib_respond_empty_udata(udata);
}

int vrdma_modify_cq(struct ib_cq *ibcq, u16 count, u16 period)
{
	struct vrdma_cq *cq = to_vcq(ibcq);
	struct virtio_rdma_cq_moderate_req req = {
		.cqn = cpu_to_le32(cq->cqn),
		.count = cpu_to_le16(count),
		.period_us = cpu_to_le16(period),
	};

	return vrdma_cmd(to_vr(ibcq->device), VIRTIO_RDMA_CMD_CQ_MODERATE, cq->ctx->id, &req,
			 sizeof(req), NULL, 0);
}
