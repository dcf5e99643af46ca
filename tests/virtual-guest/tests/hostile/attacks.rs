//! Every attack of the library that a guest and its monitor can carry out (`suffer`).

use crate::suffer::attacks;

attacks! {
    elements elements_cold elements_read elements_empty
    srq_modify cq_resize cq_overrun
    multicast multicast_dropped multicast_by_8 ah_churn
    pd_destroy doorbell_pages context_ends resets qp_churn mr_churn context_churn cq_churn
    writes_1m writes_1m_by_8 small_writes fast_registrations flush
    rnr_timers ack_timers arms kicks doorbells
    waiters crowded_kicks unplug plug tables pauses
    holes cold_writes punching huge_holes hugetlb_holes own_holes
    connections drivers
}
