/* SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB) */
/*
 * Queue pair attributes on their way to the device and back, but for rights and addresses. Masks
 * and values travel as they are: the numbers of both sides are those of the verbs interface.
 */
#ifndef VIRTIO_RDMA_QP_ATTR_H
#define VIRTIO_RDMA_QP_ATTR_H

static inline void vrdma_values_to_wire(struct virtio_rdma_qp_attr *w, const struct ib_qp_attr *a,
					u32 mask)
{
	w->mask = cpu_to_le32(mask);
	w->qp_state = a->qp_state;
	w->cur_qp_state = a->cur_qp_state;
	w->path_mtu = a->path_mtu;
	w->path_mig_state = a->path_mig_state;
	w->qkey = cpu_to_le32(a->qkey);
	w->rq_psn = cpu_to_le32(a->rq_psn);
	w->sq_psn = cpu_to_le32(a->sq_psn);
	w->dest_qpn = cpu_to_le32(a->dest_qp_num);
	w->pkey_index = cpu_to_le16(a->pkey_index);
	w->en_sqd_async_notify = a->en_sqd_async_notify;
	w->max_rd_atomic = a->max_rd_atomic;
	w->max_dest_rd_atomic = a->max_dest_rd_atomic;
	w->min_rnr_timer = a->min_rnr_timer;
	w->port_num = a->port_num;
	w->timeout = a->timeout;
	w->retry_cnt = a->retry_cnt;
	w->rnr_retry = a->rnr_retry;
}

static inline void vrdma_values_from_wire(struct ib_qp_attr *a, const struct virtio_rdma_qp_attr *w)
{
	a->qp_state = w->qp_state;
	a->cur_qp_state = w->cur_qp_state;
	a->path_mtu = w->path_mtu;
	a->path_mig_state = w->path_mig_state;
	a->qkey = le32_to_cpu(w->qkey);
	a->rq_psn = le32_to_cpu(w->rq_psn);
	a->sq_psn = le32_to_cpu(w->sq_psn);
	a->dest_qp_num = le32_to_cpu(w->dest_qpn);
	a->qp_access_flags = le32_to_cpu(w->qp_access_flags);
	a->pkey_index = le16_to_cpu(w->pkey_index);
	a->en_sqd_async_notify = w->en_sqd_async_notify;
	a->sq_draining = w->sq_draining;
	a->max_rd_atomic = w->max_rd_atomic;
	a->max_dest_rd_atomic = w->max_dest_rd_atomic;
	a->min_rnr_timer = w->min_rnr_timer;
	a->port_num = w->port_num;
	a->timeout = w->timeout;
	a->retry_cnt = w->retry_cnt;
	a->rnr_retry = w->rnr_retry;
}

#endif
