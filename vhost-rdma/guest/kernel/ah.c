// SPDX-License-Identifier: GPL-2.0
/*
 * Address vectors and address handles.
 *
 * A handle may be made where sleeping is forbidden (the connection manager does, under a spinlock): then the command polls.
 */
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

void vrdma_av_to_attr(struct ib_device *ib, struct rdma_ah_attr *attr, const struct virtio_rdma_av *av)
{
	memset(attr, 0, sizeof(*attr));
	attr->type = RDMA_AH_ATTR_TYPE_ROCE;
	rdma_ah_set_grh(attr, NULL, le32_to_cpu(av->flow_label), le16_to_cpu(av->sgid_index), av->hop_limit,
			av->traffic_class);
	rdma_ah_set_dgid_raw(attr, (void *)av->dgid);
	memcpy(attr->roce.dmac, av->dmac, sizeof(av->dmac));
	rdma_ah_set_sl(attr, av->sl);
	rdma_ah_set_port_num(attr, av->port_num ? av->port_num : 1);
	rdma_ah_set_static_rate(attr, av->static_rate);
}

int vrdma_create_ah(struct ib_ah *ibah, struct rdma_ah_init_attr *init, struct ib_udata *udata)
{
	struct vrdma *vr = to_vr(ibah->device);
	struct vrdma_ah *ah = to_vah(ibah);
	struct vrdma_pd *pd = to_vpd(ibah->pd);
	struct virtio_rdma_ah_create_req req = { .pdn = cpu_to_le32(pd->pdn) };
	struct virtio_rdma_object_resp resp;
	struct virtio_rdma_ah_resp uresp = {};
	bool done;
	int ret;

	ret = vrdma_av_from_attr(&ah->av, init->ah_attr);
	if (ret)
		return ret;
	req.av = ah->av;
	ah->ctx = pd->ctx;
	if (init->flags & RDMA_CREATE_AH_SLEEPABLE)
		ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_AH_CREATE, ah->ctx->id, &req, sizeof(req), &resp, sizeof(resp));
	else
		ret = vrdma_cmd_atomic(vr, VIRTIO_RDMA_CMD_AH_CREATE, ah->ctx->id, &req, sizeof(req), &resp,
				       sizeof(resp));
	if (ret)
		return ret;
	ah->ahn = le32_to_cpu(resp.object);
	uresp.ahn = ah->ahn;
	ret = vrdma_udata_out(udata, &uresp, sizeof(uresp));
	if (ret)
		vrdma_cmd_destroy(vr, VIRTIO_RDMA_CMD_AH_DESTROY, ah->ctx->id, ah->ahn, &done);
	return ret;
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
	struct virtio_rdma_object_req req = { .object = cpu_to_le32(ah->ahn) };
	bool done;
	int ret;

	if (flags & RDMA_DESTROY_AH_SLEEPABLE)
		return vrdma_cmd_destroy(vr, VIRTIO_RDMA_CMD_AH_DESTROY, ah->ctx->id, ah->ahn, &done);
	ret = vrdma_cmd_atomic(vr, VIRTIO_RDMA_CMD_AH_DESTROY, ah->ctx->id, &req, sizeof(req), NULL, 0);
	return vrdma_is_lost(vr) ? 0 : ret;
}
