// SPDX-License-Identifier: GPL-2.0
/*
 * What the device and its port are and can do, and counters.
 *
 * Limits are passed on as the device gives them. The port is up when the device says so and the
 * network interface runs; what that means for its addresses is in gid.c.
 */
#include <rdma/ib_addr.h>
#include <rdma/ib_cache.h>
#include <rdma/ib_mad.h>
#include "virtio_rdma.h"

static u64 vrdma_device_caps(u64 caps)
{
	u64 flags = IB_DEVICE_RC_RNR_NAK_GEN | IB_DEVICE_SYS_IMAGE_GUID |
		    IB_DEVICE_PORT_ACTIVE_EVENT;

	if (caps & VIRTIO_RDMA_CAP_SRQ_RESIZE)
		flags |= IB_DEVICE_SRQ_RESIZE;
	if (caps & VIRTIO_RDMA_CAP_MEM_MGT)
		flags |= IB_DEVICE_MEM_MGT_EXTENSIONS;
	if (caps & VIRTIO_RDMA_CAP_MW_TYPE1)
		flags |= IB_DEVICE_MEM_WINDOW;
	if (caps & VIRTIO_RDMA_CAP_MW_TYPE2)
		flags |= IB_DEVICE_MEM_WINDOW_TYPE_2B;
	if (caps & VIRTIO_RDMA_CAP_FLUSH)
		flags |= VRDMA_FLUSH_FLAGS;
	if (caps & VIRTIO_RDMA_CAP_ATOMIC_WRITE)
		flags |= VRDMA_ATOMIC_WRITE_FLAGS;
	return flags;
}

static enum ib_atomic_cap vrdma_atomic_cap(u64 caps)
{
	/* Section 7.1: the numbers are little-endian, which a program would not expect here. */
	if (!(caps & VIRTIO_RDMA_CAP_ATOMIC) || IS_ENABLED(CONFIG_CPU_BIG_ENDIAN))
		return IB_ATOMIC_NONE;
	return caps & VIRTIO_RDMA_CAP_ATOMIC_GLOB ? IB_ATOMIC_GLOB : IB_ATOMIC_HCA;
}

int vrdma_query_device(struct ib_device *ib, struct ib_device_attr *attr, struct ib_udata *udata)
{
	const struct virtio_rdma_query_device_resp *a = &to_vr(ib)->attr;
	u64 caps = to_vr(ib)->caps;

	if (udata) {
		int ret = ib_is_udata_in_empty(udata);

		if (ret)
			return ret;
	}
	memset(attr, 0, sizeof(*attr));
	attr->fw_ver = le64_to_cpu(a->fw_ver);
	attr->sys_image_guid = cpu_to_be64(le64_to_cpu(a->guid));
	attr->max_mr_size = le64_to_cpu(a->max_mr_size);
	attr->page_size_cap = le64_to_cpu(a->page_size_cap);
	attr->vendor_id = le32_to_cpu(a->vendor_id);
	attr->vendor_part_id = le32_to_cpu(a->vendor_part_id);
	attr->hw_ver = le32_to_cpu(a->hw_ver);
	attr->device_cap_flags = vrdma_device_caps(caps);
	attr->max_qp = vrdma_attr32(a->max_qp);
	attr->max_qp_wr = vrdma_attr32(a->max_qp_wr);
	attr->max_send_sge = vrdma_attr32(a->max_send_sge);
	attr->max_recv_sge = vrdma_attr32(a->max_recv_sge);
	attr->max_sge_rd = vrdma_attr32(a->max_rd_sge);
	attr->max_cq = vrdma_attr32(a->max_cq);
	attr->max_cqe = vrdma_attr32(a->max_cqe);
	attr->max_mr = vrdma_attr32(a->max_mr);
	attr->max_pd = vrdma_attr32(a->max_pd);
	attr->max_mw = vrdma_attr32(a->max_mw);
	attr->max_ah = vrdma_attr32(a->max_ah);
	attr->max_qp_rd_atom = vrdma_attr32(a->max_rd_atom);
	attr->max_qp_init_rd_atom = vrdma_attr32(a->max_init_rd_atom);
	attr->max_res_rd_atom = min_t(u64, (u64)attr->max_qp_rd_atom * attr->max_qp, INT_MAX);
	attr->atomic_cap = vrdma_atomic_cap(caps);
	attr->max_srq = vrdma_attr32(a->max_srq);
	attr->max_srq_wr = vrdma_attr32(a->max_srq_wr);
	attr->max_srq_sge = vrdma_attr32(a->max_srq_sge);
	if (caps & VIRTIO_RDMA_CAP_MEM_MGT)
		attr->max_fast_reg_page_list_len = vrdma_attr32(a->max_fast_reg_pages);
	if (caps & VIRTIO_RDMA_CAP_MCAST) {
		attr->max_mcast_grp = vrdma_attr32(a->max_mcast_groups);
		attr->max_mcast_qp_attach = vrdma_attr32(a->max_mcast_qp_attach);
		attr->max_total_mcast_qp_attach =
			min_t(u64, INT_MAX, (u64)attr->max_mcast_grp * attr->max_mcast_qp_attach);
	}
	attr->max_pkeys = min_t(u32, le32_to_cpu(a->max_pkeys), U16_MAX);
	attr->local_ca_ack_delay = min_t(u32, le32_to_cpu(a->local_ca_ack_delay), 31);
	if (caps & VIRTIO_RDMA_CAP_ZERO_BASED)
		attr->max_dm_size = VRDMA_DM_SIZE;
	if (a->clock_khz) {
		attr->hca_core_clock = le64_to_cpu(a->clock_khz);
		attr->timestamp_mask = U64_MAX;
	}
	if (caps & VIRTIO_RDMA_CAP_CQ_MODERATE) {
		attr->cq_caps.max_cq_moderation_count = U16_MAX;
		attr->cq_caps.max_cq_moderation_period = U16_MAX;
	}
	return udata ? ib_respond_empty_udata(udata) : 0;
}

int vrdma_query_port(struct ib_device *ib, u32 port, struct ib_port_attr *attr)
{
	struct vrdma *vr = to_vr(ib);
	struct virtio_rdma_query_port_resp resp;
	bool up;
	int ret;

	ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_QUERY_PORT, 0, NULL, 0, &resp, sizeof(resp));
	if (ret)
		return ret;
	up = vrdma_port_is_up(vr);
	/* The core has zeroed *attr. */
	attr->state = up ? resp.state : IB_PORT_DOWN;
	attr->phys_state = up ? resp.phys_state : IB_PORT_PHYS_STATE_DISABLED;
	attr->max_mtu = resp.max_mtu;
	attr->active_mtu = resp.active_mtu;
	attr->active_speed = resp.active_speed;
	attr->active_width = resp.active_width;
	attr->gid_tbl_len = vrdma_attr32(resp.gid_tbl_len);
	attr->pkey_tbl_len = min_t(u32, le32_to_cpu(resp.pkey_tbl_len), U16_MAX);
	attr->max_msg_sz = le32_to_cpu(resp.max_msg_sz);
	attr->bad_pkey_cntr = le32_to_cpu(resp.bad_pkey_cntr);
	attr->qkey_viol_cntr = le32_to_cpu(resp.qkey_viol_cntr);
	attr->ip_gids = true;
	attr->port_cap_flags = IB_PORT_CM_SUP;
	attr->max_vl_num = 1;
	return 0;
}

int vrdma_query_pkey(struct ib_device *ib, u32 port, u16 index, u16 *pkey)
{
	if (index)
		return -EINVAL;
	*pkey = IB_DEFAULT_PKEY_FULL;
	return 0;
}

int vrdma_port_immutable(struct ib_device *ib, u32 port, struct ib_port_immutable *imm)
{
	struct ib_port_attr attr = {};
	int ret;

	/*
	 * QP 1 needs a key for all of memory: without it there is no connection manager. A port
	 * without MADs must not have a size for them either, or the core refuses the device
	 * (drivers/infiniband/core/device.c, verify_immutable).
	 */
	if (to_vr(ib)->caps & VIRTIO_RDMA_CAP_DMA_MR) {
		imm->core_cap_flags = RDMA_CORE_PORT_IBA_ROCE_UDP_ENCAP;
		imm->max_mad_size = IB_MGMT_MAD_SIZE;
	} else {
		imm->core_cap_flags = RDMA_CORE_CAP_PROT_ROCE_UDP_ENCAP;
	}
	ret = ib_query_port(ib, port, &attr);
	if (ret)
		return ret;
	imm->pkey_tbl_len = attr.pkey_tbl_len;
	imm->gid_tbl_len = attr.gid_tbl_len;
	return 0;
}

enum rdma_link_layer vrdma_link_layer(struct ib_device *ib, u32 port)
{
	return IB_LINK_LAYER_ETHERNET;
}

void vrdma_fw_str(struct ib_device *ib, char *str)
{
	u64 v = le64_to_cpu(to_vr(ib)->attr.fw_ver);

	snprintf(str, IB_FW_VERSION_NAME_MAX, "%u.%u.%u", (u32)(v >> 32), (u32)(v >> 16) & 0xffff,
		 (u32)v & 0xffff);
}

/*
 * ---- Counters ----
 *
 * Port and device have each a part of struct virtio_rdma_query_counters_resp, in its order. The
 * core asks again at most once in RDMA_HW_STATS_DEFAULT_LIFESPAN (10 ms, or what was written to
 * `lifespan`), so a reader sees values no older than that.
 */

static const struct rdma_stat_desc vrdma_port_stats[] = {
	{ .name = "tx_bytes" },
	{ .name = "rx_bytes" },
	{ .name = "tx_messages" },
	{ .name = "rx_messages" },
	{ .name = "rnr_naks_sent" },
	{ .name = "rnr_naks_received" },
	{ .name = "ack_timeouts" },
	{ .name = "access_errors" },
	{ .name = "request_errors" },
	{ .name = "completion_errors" },
	{ .name = "receive_drops" },
};

static const struct rdma_stat_desc vrdma_device_stats[] = {
	{ .name = "events_coalesced" },
	{ .name = "completions" },
	{ .name = "events" },
	{ .name = "commands" },
};

struct rdma_hw_stats *vrdma_alloc_port_stats(struct ib_device *ib, u32 port)
{
	return rdma_alloc_hw_stats_struct(vrdma_port_stats, ARRAY_SIZE(vrdma_port_stats),
					  RDMA_HW_STATS_DEFAULT_LIFESPAN);
}

struct rdma_hw_stats *vrdma_alloc_device_stats(struct ib_device *ib)
{
	return rdma_alloc_hw_stats_struct(vrdma_device_stats, ARRAY_SIZE(vrdma_device_stats),
					  RDMA_HW_STATS_DEFAULT_LIFESPAN);
}

/* Port 0 is the device. */
int vrdma_get_hw_stats(struct ib_device *ib, struct rdma_hw_stats *stats, u32 port, int index)
{
	struct virtio_rdma_query_counters_resp resp;
	const __le64 *values = port ? &resp.tx_bytes : &resp.events_coalesced;
	int ret, i;

	BUILD_BUG_ON(offsetof(typeof(resp), events_coalesced) !=
		     ARRAY_SIZE(vrdma_port_stats) * sizeof(__le64));
	BUILD_BUG_ON(offsetof(typeof(resp), reserved) - offsetof(typeof(resp), events_coalesced) !=
		     ARRAY_SIZE(vrdma_device_stats) * sizeof(__le64));
	ret = vrdma_cmd(to_vr(ib), VIRTIO_RDMA_CMD_QUERY_COUNTERS, 0, NULL, 0, &resp,
			sizeof(resp));
	if (ret)
		return ret;
	for (i = 0; i < stats->num_counters; i++)
		stats->value[i] = le64_to_cpu(values[i]);
	return stats->num_counters;
}
