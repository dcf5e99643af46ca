// SPDX-License-Identifier: GPL-2.0
/*
 * Address vectors and address handles.
 *
 * The device makes a handle, because it checks who may be reached; the connection manager wants one
 * under a spinlock. So a kernel's handle is ours at once and gets the device's number later: the
 * command is started and not waited for, and work requests posted meanwhile are held back by the
 * queue until the number has come (held.c). A handle that the device refuses fails
 * the work requests that name it. Handles of processes are made by a command that is waited for:
 * the provider needs the number, and a refusal must be seen.
 *
 * What the device knows (struct vrdma_ah_handle) lives longer than the core's object: until its
 * last command is answered and its last work request has been rung.
 */
#include <linux/slab.h>
#include <rdma/ib_cache.h>
#include "virtio_rdma.h"

int vrdma_av_from_attr(struct virtio_rdma_av *av, const struct rdma_ah_attr *attr)
{
	const struct ib_global_route *grh;

	memset(av, 0, sizeof(*av));
	if (attr->type != RDMA_AH_ATTR_TYPE_ROCE || !(rdma_ah_get_ah_flags(attr) & IB_AH_GRH))
		return -EINVAL;
	grh = rdma_ah_read_grh(attr);
	memcpy(av->dgid, grh->dgid.raw, sizeof(av->dgid));
	memcpy(av->dmac, attr->roce.dmac, sizeof(av->dmac));
	av->sgid_index = cpu_to_le16(grh->sgid_index);
	av->flow_label = cpu_to_le32(grh->flow_label);
	av->hop_limit = grh->hop_limit;
	av->traffic_class = grh->traffic_class;
	av->sl = rdma_ah_get_sl(attr);
	av->port_num = rdma_ah_get_port_num(attr);
	av->flags = VIRTIO_RDMA_AV_GRH;
	av->static_rate = rdma_ah_get_static_rate(attr);
	return 0;
}

void vrdma_av_to_attr(struct ib_device *ib, struct rdma_ah_attr *attr,
		      const struct virtio_rdma_av *av)
{
	memset(attr, 0, sizeof(*attr));
	attr->type = RDMA_AH_ATTR_TYPE_ROCE;
	rdma_ah_set_grh(attr, NULL, le32_to_cpu(av->flow_label), le16_to_cpu(av->sgid_index),
			av->hop_limit, av->traffic_class);
	rdma_ah_set_dgid_raw(attr, (void *)av->dgid);
	memcpy(attr->roce.dmac, av->dmac, sizeof(av->dmac));
	rdma_ah_set_sl(attr, av->sl);
	rdma_ah_set_port_num(attr, av->port_num ? av->port_num : 1);
	rdma_ah_set_static_rate(attr, av->static_rate);
}

/* ---- Handles that get their number later ---- */

void vrdma_ah_handle_put(struct vrdma_ah_handle *handle)
{
	if (refcount_dec_and_test(&handle->ref)) {
		vrdma_cmd_free(handle->destroy);
		kfree(handle);
	}
}

/* The PD may be destroyed when its last handle is gone from the device (vrdma_ah_wait_idle). */
static void vrdma_ah_settled(struct vrdma *vr, struct vrdma_ah_handle *handle)
{
	atomic_dec(&handle->pd->unsettled_ahs);
	wake_up_all(&vr->ah_wait);
	vrdma_ah_handle_put(handle);
}

static void vrdma_ah_destroyed(struct vrdma *vr, void *arg, int ret, u32 object)
{
	if (ret && !vrdma_is_lost(vr))
		dev_err(&vr->vdev->dev, "an address handle was not destroyed: %d\n", ret);
	vrdma_ah_settled(vr, arg);
}

/* Takes the caller's reference and its count of the PD. */
static void vrdma_ah_start_destroy(struct vrdma *vr, struct vrdma_ah_handle *handle)
{
	struct vrdma_cmd_buf *buf = handle->destroy;
	struct virtio_rdma_object_req *req = vrdma_cmd_request(buf);

	req->object = cpu_to_le32(handle->ahn);
	handle->destroy = NULL;
	vrdma_cmd_start(vr, buf, vrdma_ah_destroyed, handle);
}

static void vrdma_ah_answered(struct vrdma *vr, void *arg, int ret, u32 object)
{
	struct vrdma_ah_handle *handle = arg;
	unsigned long flags;
	bool doomed;

	spin_lock_irqsave(&vr->ah_lock, flags);
	handle->ahn = object;
	/* The number is there for whoever sees the status. */
	smp_store_release(&handle->status, ret);
	doomed = handle->doomed;
	spin_unlock_irqrestore(&vr->ah_lock, flags);
	vrdma_ring_held(vr);
	if (doomed && !ret)
		vrdma_ah_start_destroy(vr, handle);
	else
		vrdma_ah_settled(vr, handle);
}

static struct vrdma_ah_handle *vrdma_ah_handle_new(struct vrdma_pd *pd, u32 ctx, gfp_t gfp)
{
	struct vrdma_ah_handle *handle = kzalloc(sizeof(*handle), gfp);
	struct virtio_rdma_object_req req = {};

	if (!handle)
		return NULL;
	refcount_set(&handle->ref, 1);
	handle->pd = pd;
	handle->status = -EINPROGRESS;
	/* Destruction can not fail, so what it needs is there from the beginning. */
	handle->destroy = vrdma_cmd_alloc(VIRTIO_RDMA_CMD_AH_DESTROY, ctx, &req, sizeof(req), 0,
					  gfp);
	if (!handle->destroy) {
		kfree(handle);
		return NULL;
	}
	return handle;
}

static int vrdma_create_kernel_ah(struct vrdma *vr, struct vrdma_ah *ah, struct vrdma_pd *pd,
				  const struct virtio_rdma_ah_create_req *req, gfp_t gfp)
{
	struct vrdma_ah_handle *handle;
	struct vrdma_cmd_buf *buf;
	int ret;

	if (vrdma_is_lost(vr))
		return -EIO;
	handle = vrdma_ah_handle_new(pd, ah->ctx->id, gfp);
	if (!handle)
		return -ENOMEM;
	buf = vrdma_cmd_alloc(VIRTIO_RDMA_CMD_AH_CREATE, ah->ctx->id, req, sizeof(*req),
			      sizeof(struct virtio_rdma_object_resp), gfp);
	if (!buf) {
		vrdma_ah_handle_put(handle);
		return -ENOMEM;
	}
	ah->handle = handle;
	refcount_inc(&handle->ref);
	atomic_inc(&pd->unsettled_ahs);
	vrdma_cmd_start(vr, buf, vrdma_ah_answered, handle);
	if (gfp != GFP_KERNEL)
		return 0;
	/* Who can wait is told what the device says; the acquire is for the number. */
	wait_event(vr->ah_wait, smp_load_acquire(&handle->status) != -EINPROGRESS);
	ret = handle->status;
	if (ret)
		vrdma_ah_handle_put(handle);
	return ret;
}

static void vrdma_destroy_kernel_ah(struct vrdma *vr, struct vrdma_ah_handle *handle)
{
	unsigned long flags;
	bool ours;

	spin_lock_irqsave(&vr->ah_lock, flags);
	handle->doomed = true;
	/* Without an answer the callback destroys it; what was refused is not there. */
	ours = !handle->status;
	spin_unlock_irqrestore(&vr->ah_lock, flags);
	if (ours) {
		atomic_inc(&handle->pd->unsettled_ahs);
		vrdma_ah_start_destroy(vr, handle);
	} else {
		vrdma_ah_handle_put(handle);
	}
}

/* Bounded: every command ends, by an answer or by the loss of the device. */
void vrdma_ah_wait_idle(struct vrdma *vr, struct vrdma_pd *pd)
{
	wait_event(vr->ah_wait, !atomic_read(&pd->unsettled_ahs));
}

/* ---- Verbs ---- */

static int vrdma_create_process_ah(struct vrdma *vr, struct vrdma_ah *ah,
				   const struct virtio_rdma_ah_create_req *req,
				   struct ib_udata *udata)
{
	struct virtio_rdma_object_resp resp;
	struct virtio_rdma_ah_resp uresp = {};
	int ret;

	ret = ib_is_udata_in_empty(udata);
	if (ret)
		return ret;
	ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_AH_CREATE, ah->ctx->id, req, sizeof(*req), &resp,
			sizeof(resp));
	if (ret)
		return ret;
	ah->ahn = le32_to_cpu(resp.object);
	uresp.ahn = ah->ahn;
	ret = ib_respond_udata(udata, uresp);
	if (ret)
		vrdma_cmd_destroy(vr, VIRTIO_RDMA_CMD_AH_DESTROY, ah->ctx->id, ah->ahn);
	return ret;
}

int vrdma_create_ah(struct ib_ah *ibah, struct rdma_ah_init_attr *init, struct ib_udata *udata)
{
	struct vrdma *vr = to_vr(ibah->device);
	struct vrdma_ah *ah = to_vah(ibah);
	struct vrdma_pd *pd = to_vpd(ibah->pd);
	struct virtio_rdma_ah_create_req req = { .pdn = cpu_to_le32(pd->pdn) };
	bool sleeps = init->flags & RDMA_CREATE_AH_SLEEPABLE;
	int ret;

	ret = vrdma_av_from_attr(&ah->av, init->ah_attr);
	if (ret)
		return ret;
	req.av = ah->av;
	ah->ctx = pd->ctx;
	if (udata)
		return vrdma_create_process_ah(vr, ah, &req, udata);
	return vrdma_create_kernel_ah(vr, ah, pd, &req, sleeps ? GFP_KERNEL : GFP_ATOMIC);
}

int vrdma_query_ah(struct ib_ah *ibah, struct rdma_ah_attr *attr)
{
	vrdma_av_to_attr(ibah->device, attr, &to_vah(ibah)->av);
	return 0;
}

int vrdma_destroy_ah(struct ib_ah *ibah, u32 flags)
{
	struct vrdma *vr = to_vr(ibah->device);
	struct vrdma_ah *ah = to_vah(ibah);

	if (ah->handle)
		vrdma_destroy_kernel_ah(vr, ah->handle);
	else
		vrdma_cmd_destroy(vr, VIRTIO_RDMA_CMD_AH_DESTROY, ah->ctx->id, ah->ahn);
	return 0;
}
