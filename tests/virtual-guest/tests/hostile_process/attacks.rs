//! Every attack of the library that a process can carry out.

use crate::suffer::attacks;

attacks! {
    elements elements_cold elements_read elements_empty
    srq_modify cq_resize cq_overrun
    multicast multicast_dropped multicast_by_8 ah_churn
    pd_destroy context_ends qp_churn mr_churn context_churn cq_churn
    writes_1m writes_1m_by_8 small_writes flush
    rnr_timers ack_timers kicks doorbells
    unplug plug
    holes cold_writes punching cuts huge_holes hugetlb_holes
    sessions messages shares channels jobs connects
}
