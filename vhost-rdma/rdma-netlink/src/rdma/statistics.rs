//! Hardware counters of a port.

use super::codec::messages;

messages! {
    /// A counter.
    Counter in STAT_HWCOUNTER_ENTRY {
        /// The driver's name for it.
        name: String = STAT_HWCOUNTER_ENTRY_NAME,
        /// Since the device was made.
        value: u64 = STAT_HWCOUNTER_ENTRY_VALUE,
    }
}
