// SPDX-License-Identifier: GPL-2.0
/*
 * The event queues: asynchronous events, and completion events of each vector.
 *
 * Buffers go round: taken, dispatched, given back. The handlers run in the interrupt, as those of
 * other RDMA drivers do, but only for as many events as one pass has buffers; a device that goes on
 * is served by a work item, in passes of the same length. An object is looked up by number and held
 * by a reference while its handler runs. An event for a number that we no longer know is ignored
 * (docs/virtio-rdma.md, section 7.5), and so is one whose context is not the object's: it was meant
 * for an earlier owner of the number.
 */
#include <linux/slab.h>
#include "virtio_rdma.h"

#define VRDMA_EQ_BUFFERS	128u

void vrdma_ref_init(struct vrdma_ref *ref)
{
	refcount_set(&ref->count, 1);
	init_completion(&ref->gone);
}

void vrdma_ref_put(struct vrdma_ref *ref)
{
	if (refcount_dec_and_test(&ref->count))
		complete(&ref->gone);
}

/*
 * Drops the creator's reference and waits for handlers that still run. The object is out of its
 * table by now.
 */
void vrdma_ref_wait(struct vrdma_ref *ref)
{
	vrdma_ref_put(ref);
	wait_for_completion(&ref->gone);
}

/* ---- Dispatch ---- */

/* The object of that number with a reference taken, or NULL. */
static void *vrdma_get(struct xarray *table, u32 number, size_t ref_at)
{
	unsigned long flags;
	struct vrdma_ref *ref;
	void *obj;

	xa_lock_irqsave(table, flags);
	obj = xa_load(table, number);
	if (obj) {
		ref = obj + ref_at;
		if (!refcount_inc_not_zero(&ref->count))
			obj = NULL;
	}
	xa_unlock_irqrestore(table, flags);
	return obj;
}

static struct vrdma_qp *vrdma_get_qp(struct vrdma *vr, u32 qpn)
{
	return vrdma_get(&vr->qps, qpn, offsetof(struct vrdma_qp, ref));
}

static struct vrdma_cq *vrdma_get_cq(struct vrdma *vr, u32 cqn)
{
	return vrdma_get(&vr->cqs, cqn, offsetof(struct vrdma_cq, ref));
}

static struct vrdma_srq *vrdma_get_srq(struct vrdma *vr, u32 srqn)
{
	return vrdma_get(&vr->srqs, srqn, offsetof(struct vrdma_srq, ref));
}

static void vrdma_qp_event(struct vrdma *vr, u32 ctx, u32 qpn, enum ib_event_type type)
{
	struct vrdma_qp *qp = vrdma_get_qp(vr, qpn);
	struct ib_event ev = { .event = type };

	if (!qp)
		return;
	ev.device = qp->ibqp.device;
	ev.element.qp = &qp->ibqp;
	if (qp->ctx->id == ctx && qp->ibqp.event_handler)
		qp->ibqp.event_handler(&ev, qp->ibqp.qp_context);
	vrdma_ref_put(&qp->ref);
}

static void vrdma_cq_event(struct vrdma *vr, u32 ctx, u32 cqn)
{
	struct vrdma_cq *cq = vrdma_get_cq(vr, cqn);
	struct ib_event ev = { .event = IB_EVENT_CQ_ERR };

	if (!cq)
		return;
	ev.device = cq->ibcq.device;
	ev.element.cq = &cq->ibcq;
	if (cq->ctx->id == ctx && cq->ibcq.event_handler)
		cq->ibcq.event_handler(&ev, cq->ibcq.cq_context);
	vrdma_ref_put(&cq->ref);
}

static void vrdma_srq_event(struct vrdma *vr, u32 ctx, u32 srqn, enum ib_event_type type)
{
	struct vrdma_srq *srq = vrdma_get_srq(vr, srqn);
	struct ib_event ev = { .event = type };

	if (!srq)
		return;
	ev.device = srq->ibsrq.device;
	ev.element.srq = &srq->ibsrq;
	if (srq->ctx->id == ctx && srq->ibsrq.event_handler)
		srq->ibsrq.event_handler(&ev, srq->ibsrq.srq_context);
	vrdma_ref_put(&srq->ref);
}

static void vrdma_async_event(struct vrdma *vr, const struct virtio_rdma_async_event *ev)
{
	u32 type = le32_to_cpu(ev->type);
	u32 object = le32_to_cpu(ev->object);
	u32 ctx = le32_to_cpu(ev->ctx);

	switch (type) {
	case VIRTIO_RDMA_EVENT_CQ_ERR:
		vrdma_cq_event(vr, ctx, object);
		break;
	case VIRTIO_RDMA_EVENT_QP_FATAL:
	case VIRTIO_RDMA_EVENT_QP_REQ_ERR:
	case VIRTIO_RDMA_EVENT_QP_ACCESS_ERR:
	case VIRTIO_RDMA_EVENT_COMM_EST:
	case VIRTIO_RDMA_EVENT_SQ_DRAINED:
	case VIRTIO_RDMA_EVENT_QP_LAST_WQE_REACHED:
		/* The numbers are those of enum ib_event_type (virtio_rdma_abi.h). */
		vrdma_qp_event(vr, ctx, object, (enum ib_event_type)type);
		break;
	case VIRTIO_RDMA_EVENT_SRQ_ERR:
	case VIRTIO_RDMA_EVENT_SRQ_LIMIT_REACHED:
		vrdma_srq_event(vr, ctx, object, (enum ib_event_type)type);
		break;
	case VIRTIO_RDMA_EVENT_PORT_ACTIVE:
	case VIRTIO_RDMA_EVENT_PORT_ERR:
	case VIRTIO_RDMA_EVENT_GID_CHANGE:
		vrdma_ib_event(vr, (enum ib_event_type)type);
		break;
	case VIRTIO_RDMA_EVENT_DEVICE_FATAL:
		vrdma_failed(vr, "the device raised a fatal event");
		break;
	default:
		dev_dbg(&vr->vdev->dev, "unknown event %u\n", type);
	}
}

static void vrdma_completion(struct vrdma *vr, u32 cqn)
{
	struct vrdma_cq *cq = vrdma_get_cq(vr, cqn);

	if (!cq)
		return;
	if (cq->ibcq.comp_handler)
		cq->ibcq.comp_handler(&cq->ibcq, cq->ibcq.cq_context);
	vrdma_ref_put(&cq->ref);
}

/* After a loss: whoever sleeps for a completion shall look, and find its work flushed. */
void vrdma_wake_all_cqs(struct vrdma *vr)
{
	struct vrdma_cq *cq;
	unsigned long cqn;

	xa_for_each(&vr->cqs, cqn, cq)
		vrdma_completion(vr, cqn);
}

static void vrdma_eq_dispatch(struct vrdma_eq *eq, const void *buffer, u32 len)
{
	const struct virtio_rdma_comp_event *comp = buffer;

	if (len < eq->size)
		return;
	if (eq == &eq->vr->event_eq)
		vrdma_async_event(eq->vr, buffer);
	else
		vrdma_completion(eq->vr, le32_to_cpu(comp->cqn));
}

/* ---- The queues ---- */

static int vrdma_eq_give(struct vrdma_eq *eq, void *buffer)
{
	struct scatterlist sg;

	sg_init_one(&sg, buffer, eq->size);
	return virtqueue_add_inbuf(eq->vq, &sg, 1, buffer, GFP_ATOMIC);
}

/* One buffer, with the lock dropped over its handler: a handler may well take long. */
static bool vrdma_eq_one(struct vrdma_eq *eq, unsigned long *flags)
{
	void *buffer;
	u32 len;

	buffer = virtqueue_get_buf(eq->vq, &len);
	if (!buffer)
		return false;
	/* The buffer is ours until it is given back. */
	spin_unlock_irqrestore(&eq->lock, *flags);
	vrdma_eq_dispatch(eq, buffer, len);
	spin_lock_irqsave(&eq->lock, *flags);
	if (vrdma_eq_give(eq, buffer))
		dev_warn(&eq->vr->vdev->dev, "an event buffer could not be given back\n");
	return true;
}

/* One pass. True if the device goes on: callbacks are off then, and the caller comes again. */
static bool vrdma_eq_pass(struct vrdma_eq *eq)
{
	u32 left = VRDMA_EQ_BUFFERS;
	unsigned long flags;
	bool more;

	spin_lock_irqsave(&eq->lock, flags);
	do {
		virtqueue_disable_cb(eq->vq);
		while (left && vrdma_eq_one(eq, &flags))
			left--;
		more = !left;
	} while (!more && !virtqueue_enable_cb(eq->vq));
	if (left != VRDMA_EQ_BUFFERS)
		virtqueue_kick(eq->vq);
	spin_unlock_irqrestore(&eq->lock, flags);
	return more;
}

static void vrdma_eq_run(struct vrdma_eq *eq)
{
	if (vrdma_eq_pass(eq))
		queue_work(system_highpri_wq, &eq->work);
}

static void vrdma_eq_work(struct work_struct *work)
{
	vrdma_eq_run(container_of(work, struct vrdma_eq, work));
}

void vrdma_event_callback(struct virtqueue *vq)
{
	struct vrdma *vr = vq->vdev->priv;

	vrdma_eq_run(&vr->event_eq);
}

void vrdma_comp_callback(struct virtqueue *vq)
{
	struct vrdma *vr = vq->vdev->priv;

	vrdma_eq_run(&vr->comp_eqs[vq->index - VIRTIO_RDMA_VQ_COMP_BASE]);
}

int vrdma_eq_init(struct vrdma *vr, struct vrdma_eq *eq, struct virtqueue *vq, u32 size)
{
	eq->vr = vr;
	eq->vq = vq;
	eq->size = size;
	spin_lock_init(&eq->lock);
	INIT_WORK(&eq->work, vrdma_eq_work);
	eq->buffers = kcalloc(VRDMA_EQ_BUFFERS, size, GFP_KERNEL);
	return eq->buffers ? 0 : -ENOMEM;
}

int vrdma_eq_stock(struct vrdma_eq *eq)
{
	u32 n = min(VRDMA_EQ_BUFFERS, virtqueue_get_vring_size(eq->vq));
	unsigned long flags;
	int ret = 0;
	u32 i;

	spin_lock_irqsave(&eq->lock, flags);
	for (i = 0; i < n && !ret; i++)
		ret = vrdma_eq_give(eq, eq->buffers + i * eq->size);
	virtqueue_kick(eq->vq);
	spin_unlock_irqrestore(&eq->lock, flags);
	return ret;
}

/* After the reset of the device. */
void vrdma_eq_free(struct vrdma_eq *eq)
{
	if (eq->vq) {
		cancel_work_sync(&eq->work);
		while (virtqueue_detach_unused_buf(eq->vq))
			;
	}
	kfree(eq->buffers);
	eq->buffers = NULL;
	eq->vq = NULL;
}
