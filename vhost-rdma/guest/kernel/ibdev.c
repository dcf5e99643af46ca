// SPDX-License-Identifier: GPL-2.0
/*
 * The RDMA device as the verbs core sees it. Only operations that work are registered: the
 * capabilities of the device choose the tables.
 *
 * Its parent in sysfs is the parent of the network interface, where programs look for the interface
 * that belongs to it.
 */
#include <linux/netdevice.h>
#include "virtio_rdma.h"

static const struct ib_device_ops vrdma_ops = {
	.owner = THIS_MODULE,
	.driver_id = VRDMA_DRIVER_ID,
	VRDMA_ROBUST_UDATA
	.uverbs_abi_ver = VIRTIO_RDMA_UVERBS_ABI_VERSION,

	.add_gid = vrdma_add_gid,
	.alloc_hw_device_stats = vrdma_alloc_device_stats,
	.alloc_hw_port_stats = vrdma_alloc_port_stats,
	.alloc_pd = vrdma_alloc_pd,
	.alloc_ucontext = vrdma_alloc_ucontext,
	.create_ah = vrdma_create_ah,
	.create_cq = vrdma_create_cq,
	.create_qp = vrdma_create_qp,
	.create_user_ah = vrdma_create_ah,
	.dealloc_pd = vrdma_dealloc_pd,
	.dealloc_ucontext = vrdma_dealloc_ucontext,
	.del_gid = vrdma_del_gid,
	.dereg_mr = vrdma_dereg_mr,
	.destroy_ah = vrdma_destroy_ah,
	.destroy_cq = vrdma_destroy_cq,
	.destroy_qp = vrdma_destroy_qp,
	.disassociate_ucontext = vrdma_disassociate_ucontext,
	.get_dev_fw_str = vrdma_fw_str,
	.get_hw_stats = vrdma_get_hw_stats,
	.get_link_layer = vrdma_link_layer,
	.get_port_immutable = vrdma_port_immutable,
	.mmap = vrdma_mmap_op,
	.mmap_free = vrdma_mmap_free,
	.modify_qp = vrdma_modify_qp,
	.poll_cq = vrdma_poll_cq,
	.post_recv = vrdma_post_recv,
	.post_send = vrdma_post_send,
	.query_ah = vrdma_query_ah,
	.query_device = vrdma_query_device,
	.query_pkey = vrdma_query_pkey,
	.query_port = vrdma_query_port,
	.query_qp = vrdma_query_qp,
	.query_ucontext = vrdma_query_ucontext,
	.reg_user_mr = vrdma_reg_user_mr,
	.reg_user_mr_dmabuf = vrdma_reg_user_mr_dmabuf,
	.req_notify_cq = vrdma_req_notify_cq,

	INIT_RDMA_OBJ_SIZE(ib_ah, vrdma_ah, ibah),
	INIT_RDMA_OBJ_SIZE(ib_cq, vrdma_cq, ibcq),
	INIT_RDMA_OBJ_SIZE(ib_pd, vrdma_pd, ibpd),
	INIT_RDMA_OBJ_SIZE(ib_qp, vrdma_qp, ibqp),
	INIT_RDMA_OBJ_SIZE(ib_ucontext, vrdma_ucontext, ibucontext),
};

static const struct ib_device_ops vrdma_dma_mr_ops = {
	.get_dma_mr = vrdma_get_dma_mr,
};

static const struct ib_device_ops vrdma_srq_ops = {
	.create_srq = vrdma_create_srq,
	.destroy_srq = vrdma_destroy_srq,
	.modify_srq = vrdma_modify_srq,
	.post_srq_recv = vrdma_post_srq_recv,
	.query_srq = vrdma_query_srq,

	INIT_RDMA_OBJ_SIZE(ib_srq, vrdma_srq, ibsrq),
};

static const struct ib_device_ops vrdma_mem_mgt_ops = {
	.alloc_mr = vrdma_alloc_mr,
	.map_mr_sg = vrdma_map_mr_sg,
};

static const struct ib_device_ops vrdma_mw_ops = {
	.alloc_mw = vrdma_alloc_mw,
	.dealloc_mw = vrdma_dealloc_mw,

	INIT_RDMA_OBJ_SIZE(ib_mw, vrdma_mw, ibmw),
};

/* Regions of device memory are zero-based. */
static const struct ib_device_ops vrdma_dm_ops = {
	.alloc_dm = vrdma_alloc_dm,
	.dealloc_dm = vrdma_dealloc_dm,
	.reg_dm_mr = vrdma_reg_dm_mr,
};

static const struct ib_device_ops vrdma_resize_ops = {
	VRDMA_RESIZE_CQ_OP = vrdma_resize_cq,
};

static const struct ib_device_ops vrdma_moderate_ops = {
	.modify_cq = vrdma_modify_cq,
};

static const struct ib_device_ops vrdma_mcast_ops = {
	.attach_mcast = vrdma_attach_mcast,
	.detach_mcast = vrdma_detach_mcast,
};

static const struct ib_device_ops vrdma_rereg_ops = {
	.rereg_user_mr = vrdma_rereg_user_mr,
};

static void vrdma_set_ops(struct ib_device *ib, u64 caps)
{
	static const struct {
		u64 any_of;
		const struct ib_device_ops *ops;
	} tables[] = {
		{ VIRTIO_RDMA_CAP_DMA_MR, &vrdma_dma_mr_ops },
		{ VIRTIO_RDMA_CAP_SRQ, &vrdma_srq_ops },
		{ VIRTIO_RDMA_CAP_MEM_MGT, &vrdma_mem_mgt_ops },
		{ VIRTIO_RDMA_CAP_MW_TYPE1 | VIRTIO_RDMA_CAP_MW_TYPE2, &vrdma_mw_ops },
		{ VIRTIO_RDMA_CAP_ZERO_BASED, &vrdma_dm_ops },
		{ VIRTIO_RDMA_CAP_CQ_RESIZE, &vrdma_resize_ops },
		{ VIRTIO_RDMA_CAP_CQ_MODERATE, &vrdma_moderate_ops },
		{ VIRTIO_RDMA_CAP_MCAST, &vrdma_mcast_ops },
		{ VIRTIO_RDMA_CAP_MR_REREG, &vrdma_rereg_ops },
	};
	u32 i;

	ib_set_device_ops(ib, &vrdma_ops);
	for (i = 0; i < ARRAY_SIZE(tables); i++)
		if (caps & tables[i].any_of)
			ib_set_device_ops(ib, tables[i].ops);
}

int vrdma_ib_register(struct vrdma *vr, struct net_device *netdev)
{
	struct vrdma_ibdev *ibdev;
	struct ib_device *ib;
	int ret;

	lockdep_assert_held(&vr->ib_lock);
	ibdev = ib_alloc_device(vrdma_ibdev, ib);
	if (!ibdev)
		return -ENOMEM;
	ibdev->vr = vr;
	ib = &ibdev->ib;
	ib->node_type = RDMA_NODE_IB_CA;
	ib->phys_port_cnt = 1;
	ib->num_comp_vectors = vr->num_comp;
	ib->node_guid = cpu_to_be64(le64_to_cpu(vr->attr.guid));
	ib->dev.parent = netdev->dev.parent ? netdev->dev.parent : &vr->vdev->dev;
	ib->driver_def = vrdma_uapi_defs;
	strscpy(ib->node_desc, "virtio RDMA device", sizeof(ib->node_desc));
	vrdma_set_ops(ib, vr->caps);
	ret = ib_device_set_netdev(ib, netdev, 1);
	if (!ret)
		ret = ib_register_device(ib, "vrdma%d", vr->dma_dev);
	if (ret) {
		dev_err(&vr->vdev->dev, "the RDMA device could not be registered: %d\n", ret);
		ib_dealloc_device(ib);
		return ret;
	}
	vr->ib = ibdev;
	rcu_assign_pointer(vr->live, ibdev);
	dev_info(&vr->vdev->dev, "%s is paired with %s\n", dev_name(&ib->dev), netdev_name(netdev));
	return 0;
}

/* Leaves the structure: orphaned memory of a lost device still refers to it. */
void vrdma_ib_unregister(struct vrdma *vr)
{
	lockdep_assert_held(&vr->ib_lock);
	if (!rcu_access_pointer(vr->live))
		return;
	RCU_INIT_POINTER(vr->live, NULL);
	/* Event handlers that saw it registered. */
	synchronize_rcu();
	ib_unregister_device(&vr->ib->ib);
}

void vrdma_ib_dealloc(struct vrdma *vr)
{
	struct vrdma_ibdev *ibdev = vr->ib;

	lockdep_assert_held(&vr->ib_lock);
	if (!ibdev)
		return;
	vr->ib = NULL;
	ib_dealloc_device(&ibdev->ib);
}

/*
 * An event of the port or the device, from any context. The RDMA device comes and goes under us:
 * vrdma_ib_unregister() waits for a grace period, and the core copies the event.
 */
void vrdma_ib_event(struct vrdma *vr, enum ib_event_type type)
{
	struct ib_event ev = { .event = type, .element.port_num = 1 };
	struct vrdma_ibdev *ibdev;

	rcu_read_lock();
	ibdev = rcu_dereference(vr->live);
	if (ibdev) {
		ev.device = &ibdev->ib;
		ib_dispatch_event(&ev);
	}
	rcu_read_unlock();
}
