// SPDX-License-Identifier: GPL-2.0
/*
 * The port's addresses at the device, and whether the port is up.
 *
 * The GID table is the verbs core's: it derives the entries from the addresses of the network
 * interface, and keeps them while that is down. The device has them only while the port is up
 * (docs/virtio-rdma.md, section 10), since it moves data under every address that it has. So we
 * keep what the core gave us, take it from the device when the port goes down and give it again
 * when the port comes up: before the core is told of the one, so that nothing moves behind
 * PORT_ERR, and of the other, so that whoever waits for PORT_ACTIVE finds the addresses in effect.
 */
#include <linux/netdevice.h>
#include "virtio_rdma.h"

struct vrdma_gid {
	struct list_head list;
	union ib_gid gid;
	u16 index;
};

static int vrdma_gid_set(struct vrdma *vr, const struct vrdma_gid *gid, bool set)
{
	struct virtio_rdma_gid_set_req req = {
		.index = cpu_to_le16(gid->index),
		.type = set ? VIRTIO_RDMA_GID_ROCE_V2 : VIRTIO_RDMA_GID_NONE,
	};

	if (set)
		memcpy(req.gid, gid->gid.raw, sizeof(req.gid));
	return vrdma_cmd(vr, VIRTIO_RDMA_CMD_GID_SET, 0, &req, sizeof(req), NULL, 0);
}

/* Only the device knows which addresses are ours, so it is asked with the port down too. */
static int vrdma_gid_give(struct vrdma *vr, const struct vrdma_gid *gid)
{
	int ret = vrdma_gid_set(vr, gid, true);

	if (!ret && !vr->port_active)
		ret = vrdma_gid_set(vr, gid, false);
	return ret;
}

int vrdma_add_gid(const struct ib_gid_attr *attr, void **context)
{
	struct vrdma *vr = to_vr(attr->device);
	struct vrdma_gid *gid;
	int ret;

	if (attr->gid_type != IB_GID_TYPE_ROCE_UDP_ENCAP)
		return -EOPNOTSUPP;
	gid = kzalloc(sizeof(*gid), GFP_KERNEL);
	if (!gid)
		return -ENOMEM;
	gid->gid = attr->gid;
	gid->index = attr->index;
	mutex_lock(&vr->gid_lock);
	ret = vrdma_gid_give(vr, gid);
	if (!ret)
		list_add_tail(&gid->list, &vr->gids);
	mutex_unlock(&vr->gid_lock);
	if (ret)
		kfree(gid);
	else
		*context = gid;
	return ret;
}

int vrdma_del_gid(const struct ib_gid_attr *attr, void **context)
{
	struct vrdma *vr = to_vr(attr->device);
	struct vrdma_gid *gid = *context;
	int ret;

	*context = NULL;
	mutex_lock(&vr->gid_lock);
	list_del(&gid->list);
	ret = vrdma_gid_set(vr, gid, false);
	mutex_unlock(&vr->gid_lock);
	kfree(gid);
	return vrdma_is_lost(vr) ? 0 : ret;
}

static bool vrdma_netdev_is_up(struct vrdma *vr)
{
	struct net_device *netdev;
	bool up;

	spin_lock(&vr->pair_lock);
	netdev = vr->netdev;
	up = netdev && netif_running(netdev) && netif_carrier_ok(netdev);
	spin_unlock(&vr->pair_lock);
	return up;
}

/* Down at once, and up when the addresses are in effect. */
bool vrdma_port_is_up(struct vrdma *vr)
{
	return READ_ONCE(vr->port_active) && vrdma_netdev_is_up(vr);
}

/* Before an RDMA device is registered: there are no addresses. */
void vrdma_port_begin(struct vrdma *vr)
{
	mutex_lock(&vr->gid_lock);
	WRITE_ONCE(vr->port_active, vrdma_netdev_is_up(vr));
	mutex_unlock(&vr->gid_lock);
}

/* The interface went up or down, perhaps both. */
void vrdma_port_changed(struct work_struct *work)
{
	struct vrdma *vr = container_of(work, struct vrdma, port_work);
	const struct vrdma_gid *gid;
	bool up, changed;
	int ret;

	mutex_lock(&vr->gid_lock);
	up = vrdma_netdev_is_up(vr);
	changed = vr->port_active != up;
	if (changed) {
		list_for_each_entry(gid, &vr->gids, list) {
			ret = vrdma_gid_set(vr, gid, up);
			if (ret && !vrdma_is_lost(vr))
				dev_warn(&vr->vdev->dev, "the address %pI6c could not be %s: %d\n",
					 gid->gid.raw, up ? "set again" : "removed", ret);
		}
		WRITE_ONCE(vr->port_active, up);
	}
	mutex_unlock(&vr->gid_lock);
	if (changed)
		vrdma_ib_event(vr, up ? IB_EVENT_PORT_ACTIVE : IB_EVENT_PORT_ERR);
}
