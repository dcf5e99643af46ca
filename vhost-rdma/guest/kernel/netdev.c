// SPDX-License-Identifier: GPL-2.0
/*
 * The network interface that belongs to us: found by MAC address, when it exists, for as long as it
 * exists.
 *
 * An address proves nothing: whoever has a network namespace can give any address to an interface
 * made there, a dummy or one end of a veth pair. So an interface is taken only in the initial
 * namespace, where RDMA devices begin, and only if a device stands behind it. Once it is ours it
 * stays so, to whichever namespace it is moved.
 *
 * Notifiers run under the rtnl lock and registration of an RDMA device takes it, so that everything
 * happens in a work item. A notifier that is registered is told of all interfaces that exist
 * already: there is no other search.
 */
#include <linux/etherdevice.h>
#include <linux/if_vlan.h>
#include <linux/netdevice.h>
#include <linux/rtnetlink.h>
#include <net/net_namespace.h>
#include "virtio_rdma.h"

/* Interfaces stacked on ours often have its address. */
static bool vrdma_netdev_is_stacked(const struct net_device *netdev)
{
	return is_vlan_dev(netdev) || netif_is_macvlan(netdev) || netif_is_bridge_master(netdev) ||
	       netif_is_bond_master(netdev) || netif_is_team_master(netdev);
}

static bool vrdma_netdev_matches(const struct vrdma *vr, const struct net_device *netdev)
{
	if (netdev->type != ARPHRD_ETHER || netdev->addr_len != ETH_ALEN)
		return false;
	if (!net_eq(dev_net(netdev), &init_net) || !netdev->dev.parent)
		return false;
	if (vrdma_netdev_is_stacked(netdev))
		return false;
	return ether_addr_equal_unaligned(netdev->dev_addr, vr->mac) ||
	       ether_addr_equal_unaligned(netdev->perm_addr, vr->mac);
}

static int vrdma_netdev_event(struct notifier_block *nb, unsigned long event, void *ptr)
{
	struct vrdma *vr = container_of(nb, struct vrdma, netdev_nb);
	struct net_device *netdev = netdev_notifier_info_to_dev(ptr);
	bool ours, work = false;

	spin_lock(&vr->pair_lock);
	ours = vr->netdev == netdev;
	switch (event) {
	case NETDEV_REGISTER:
	case NETDEV_CHANGEADDR:
		/*
		 * An interface that is on its way out still holds the place; the work item looks
		 * again.
		 */
		if (!vr->netdev && netdev->reg_state <= NETREG_REGISTERED &&
		    vrdma_netdev_matches(vr, netdev)) {
			dev_hold(netdev);
			vr->netdev = netdev;
			work = true;
		}
		break;
	case NETDEV_UNREGISTER:
		/* Also raised when it moves to another namespace, where it stays ours. */
		if (ours && netdev->reg_state == NETREG_UNREGISTERING) {
			vr->netdev_gone = true;
			work = true;
		}
		break;
	default:
		break;
	}
	spin_unlock(&vr->pair_lock);
	if (ours && (event == NETDEV_UP || event == NETDEV_DOWN || event == NETDEV_CHANGE))
		queue_work(system_long_wq, &vr->port_work);
	if (work)
		queue_work(system_long_wq, &vr->pair_work);
	return NOTIFY_DONE;
}

static void vrdma_drop_netdev(struct vrdma *vr)
{
	struct net_device *netdev;

	spin_lock(&vr->pair_lock);
	netdev = vr->netdev;
	vr->netdev = NULL;
	vr->netdev_gone = false;
	spin_unlock(&vr->pair_lock);
	if (netdev)
		dev_put(netdev);
}

/* Another interface with the address may have come while the old one was on its way out. */
static void vrdma_look_again(struct vrdma *vr)
{
	struct net_device *netdev;

	rtnl_lock();
	spin_lock(&vr->pair_lock);
	for_each_netdev(&init_net, netdev) {
		if (!vr->netdev && netdev->reg_state == NETREG_REGISTERED &&
		    vrdma_netdev_matches(vr, netdev)) {
			dev_hold(netdev);
			vr->netdev = netdev;
			queue_work(system_long_wq, &vr->pair_work);
		}
	}
	spin_unlock(&vr->pair_lock);
	rtnl_unlock();
}

static void vrdma_pair(struct work_struct *work)
{
	struct vrdma *vr = container_of(work, struct vrdma, pair_work);
	struct net_device *netdev;
	bool gone;

	mutex_lock(&vr->ib_lock);
	spin_lock(&vr->pair_lock);
	netdev = vr->netdev;
	gone = vr->netdev_gone;
	spin_unlock(&vr->pair_lock);
	if (gone) {
		vrdma_ib_unregister(vr);
		/* Orphans of a lost device refer to it; it goes with them. */
		if (!vrdma_is_lost(vr))
			vrdma_ib_dealloc(vr);
		vrdma_drop_netdev(vr);
	} else if (netdev && vr->up && !vr->ib && !vrdma_is_lost(vr)) {
		vrdma_port_begin(vr);
		vrdma_ib_register(vr, netdev);
	}
	mutex_unlock(&vr->ib_lock);
	if (gone)
		vrdma_look_again(vr);
}

int vrdma_netdev_watch(struct vrdma *vr)
{
	int ret;

	INIT_WORK(&vr->pair_work, vrdma_pair);
	INIT_WORK(&vr->port_work, vrdma_port_changed);
	vr->netdev_nb.notifier_call = vrdma_netdev_event;
	ret = register_netdevice_notifier(&vr->netdev_nb);
	vr->netdev_watched = !ret;
	return ret;
}

/* The device is there again, and its interface was never gone. */
void vrdma_netdev_pair(struct vrdma *vr)
{
	queue_work(system_long_wq, &vr->pair_work);
}

void vrdma_netdev_unwatch(struct vrdma *vr)
{
	if (!vr->netdev_watched)
		return;
	vr->netdev_watched = false;
	unregister_netdevice_notifier(&vr->netdev_nb);
	cancel_work_sync(&vr->pair_work);
	cancel_work_sync(&vr->port_work);
	mutex_lock(&vr->ib_lock);
	vrdma_ib_unregister(vr);
	mutex_unlock(&vr->ib_lock);
	vrdma_drop_netdev(vr);
}
