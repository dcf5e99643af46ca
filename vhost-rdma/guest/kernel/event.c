// SPDX-License-Identifier: GPL-2.0
/*
 * The event queues: asynchronous events, and completion events of each vector.
 *
 * Buffers go round: taken, dispatched, given back. The handlers run in the interrupt, as those of other RDMA drivers do. An object is
 * looked up by number and held by a reference while its handler runs; an event for a number that we no longer know is ignored
 * (docs/virtio-rdma.md, section 7.5).
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

/* Drops the creator's reference and waits for handlers that still run. The object is out of its table by now. */
void vrdma_ref_wait(struct vrdma_ref *ref)
{
	vrdma_ref_put(ref);
	wait_for_completion(&ref->gone);
}

int vrdma_eq_init(struct vrdma *vr, struct vrdma_eq *eq, struct virtqueue *vq, u32 size)
{
	eq->vr = vr;
	eq->vq = vq;
	eq->size = size;
	spin_lock_init(&eq->lock);
	eq->buffers = kcalloc(VRDMA_EQ_BUFFERS, size, GFP_KERNEL);
	return eq->buffers ? 0 : -ENOMEM;
}

static int vrdma_eq_give(struct vrdma_eq *eq, void *buffer)
{
	struct scatterlist sg;

	sg_init_one(&sg, buffer, eq->size);
	return virtqueue_add_inbuf(eq->vq, &sg, 1, buffer, GFP_ATOMIC);
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
	if (eq->vq)
		while (virtqueue_detach_unused_buf(eq->vq))
			;
	kfree(eq->buffers);
	eq->buffers = NULL;
	eq->vq = NULL;
}

#define VRDMA_GET(name, type, table)							\
	static struct type *name(struct vrdma *vr, u32 number)				\
	{										\
		struct type *obj;							\
		unsigned long flags;							\
											\
		xa_lock_irqsave(&vr->table, flags);					\
		obj = xa_load(&vr->table, number);					\
		if (obj && !refcount_inc_not_zero(&obj->ref.count))			\
			obj = NULL;							\
		xa_unlock_irqrestore(&vr->table, flags);				\
		return obj;								\
	}
VRDMA_GET(vrdma_get_qp, vrdma_qp, qps)
VRDMA_GET(vrdma_get_cq, vrdma_cq, cqs)
VRDMA_GET(vrdma_get_srq, vrdma_srq, srqs)

static void vrdma_qp_event(struct vrdma *vr, u32 qpn, enum ib_event_type type)
{
	struct vrdma_qp *qp = vrdma_get_qp(vr, qpn);
	struct ib_event ev = { .event = type };

	if (!qp)
		return;
	ev.device = qp->ibqp.device;
	ev.element.qp = &qp->ibqp;
	if (qp->ibqp.event_handler)
		qp->ibqp.event_handler(&ev, qp->ibqp.qp_context);
	vrdma_ref_put(&qp->ref);
}

static void vrdma_cq_event(struct vrdma *vr, u32 cqn)
{
	struct vrdma_cq *cq = vrdma_get_cq(vr, cqn);
	struct ib_event ev = { .event = IB_EVENT_CQ_ERR };

	if (!cq)
		return;
	ev.device = cq->ibcq.device;
	ev.element.cq = &cq->ibcq;
	if (cq->ibcq.event_handler)
		cq->ibcq.event_handler(&ev, cq->ibcq.cq_context);
	vrdma_ref_put(&cq->ref);
}

static void vrdma_srq_event(struct vrdma *vr, u32 srqn, enum ib_event_type type)
{
	struct vrdma_srq *srq = vrdma_get_srq(vr, srqn);
	struct ib_event ev = { .event = type };

	if (!srq)
		return;
	ev.device = srq->ibsrq.device;
	ev.element.srq = &srq->ibsrq;
	if (srq->ibsrq.event_handler)
		srq->ibsrq.event_handler(&ev, srq->ibsrq.srq_context);
	vrdma_ref_put(&srq->ref);
}

/* The RDMA device comes and goes under us: vrdma_ib_unregister waits for a grace period. The core copies the event. */
static void vrdma_port_event(struct vrdma *vr, enum ib_event_type type)
{
	struct ib_event ev = { .event = type, .element.port_num = 1 };
	struct vrdma_ibdev *ibdev;

	rcu_read_lock();
	ibdev = READ_ONCE(vr->ib);
	if (ibdev && smp_load_acquire(&vr->registered)) {
		ev.device = &ibdev->ib;
		ib_dispatch_event(&ev);
	}
	rcu_read_unlock();
}

static void vrdma_async_event(struct vrdma *vr, const struct virtio_rdma_async_event *ev)
{
	u32 type = le32_to_cpu(ev->type);
	u32 object = le32_to_cpu(ev->object);

	switch (type) {
	case VIRTIO_RDMA_EVENT_CQ_ERR:
		vrdma_cq_event(vr, object);
		break;
	case VIRTIO_RDMA_EVENT_QP_FATAL:
	case VIRTIO_RDMA_EVENT_QP_REQ_ERR:
	case VIRTIO_RDMA_EVENT_QP_ACCESS_ERR:
	case VIRTIO_RDMA_EVENT_COMM_EST:
	case VIRTIO_RDMA_EVENT_SQ_DRAINED:
	case VIRTIO_RDMA_EVENT_QP_LAST_WQE_REACHED:
		/* The numbers are those of enum ib_event_type (virtio_rdma_abi.h). */
		vrdma_qp_event(vr, object, (enum ib_event_type)type);
		break;
	case VIRTIO_RDMA_EVENT_SRQ_ERR:
	case VIRTIO_RDMA_EVENT_SRQ_LIMIT_REACHED:
		vrdma_srq_event(vr, object, (enum ib_event_type)type);
		break;
	case VIRTIO_RDMA_EVENT_PORT_ACTIVE:
	case VIRTIO_RDMA_EVENT_PORT_ERR:
	case VIRTIO_RDMA_EVENT_GID_CHANGE:
		vrdma_port_event(vr, (enum ib_event_type)type);
		break;
	case VIRTIO_RDMA_EVENT_DEVICE_FATAL:
		vrdma_lost(vr, "the device raised a fatal event");
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

/*
 * The lock covers the virtqueue, not the handlers: a handler may post or destroy nothing here, but it may well take long. The buffer is ours until it
 * is given back.
 */
static void vrdma_eq_run(struct vrdma_eq *eq)
{
	unsigned long flags;
	void *buffer;
	bool given;
	u32 len;

	spin_lock_irqsave(&eq->lock, flags);
	do {
		given = false;
		virtqueue_disable_cb(eq->vq);
		while ((buffer = virtqueue_get_buf(eq->vq, &len))) {
			spin_unlock_irqrestore(&eq->lock, flags);
			vrdma_eq_dispatch(eq, buffer, len);
			spin_lock_irqsave(&eq->lock, flags);
			if (vrdma_eq_give(eq, buffer))
				dev_warn(&eq->vr->vdev->dev, "an event buffer could not be given back\n");
			given = true;
		}
		if (given)
			virtqueue_kick(eq->vq);
	} while (!virtqueue_enable_cb(eq->vq));
	spin_unlock_irqrestore(&eq->lock, flags);
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

/* After a loss: whoever sleeps for a completion shall look, and find its work flushed. */
void vrdma_wake_all_cqs(struct vrdma *vr)
{
	struct vrdma_cq *cq;
	unsigned long cqn;

	xa_for_each(&vr->cqs, cqn, cq)
		vrdma_completion(vr, cqn);
}
