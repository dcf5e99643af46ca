//! The kubelet's checkpoint, as far as it says who has what.
//!
//! The kubelet writes the file before it answers anybody with what `Allocate` gave, and reads it
//! when it starts. It names pods by UID, and ordinary init containers' devices are in it, which no
//! kubelet lists. Its format is the kubelet's own: whatever does not fit says nothing, and nothing
//! may be concluded from that.

use std::collections::BTreeMap;

use serde::Deserialize;

/// Its name in the kubelet's plugin directory.
pub const CHECKPOINT: &str = "kubelet_internal_checkpoint";

/// Pod UIDs by resource and ID.
pub type Checkpoint = BTreeMap<(String, String), String>;

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct File {
    data: Data,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Data {
    #[serde(default)]
    pod_device_entries: Option<Vec<Entry>>,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(rename = "PodUID")]
    pod_uid: String,
    #[serde(rename = "ResourceName")]
    resource_name: String,
    #[serde(rename = "DeviceIDs")]
    device_ids: DeviceIds,
}

/// A list until 1.20, then lists by NUMA node.
#[derive(Deserialize)]
#[serde(untagged)]
enum DeviceIds {
    Flat(Vec<String>),
    ByNuma(BTreeMap<String, Vec<String>>),
}

/// Understands the file; `None` if it is not one.
#[must_use]
pub fn checkpoint(text: &[u8]) -> Option<Checkpoint> {
    let file: File = serde_json::from_slice(text).ok()?;
    let mut known = BTreeMap::new();
    for entry in file.data.pod_device_entries.unwrap_or_default() {
        let ids: Vec<String> = match entry.device_ids {
            DeviceIds::Flat(ids) => ids,
            DeviceIds::ByNuma(nodes) => nodes.into_values().flatten().collect(),
        };
        for id in ids {
            known.insert((entry.resource_name.clone(), id), entry.pod_uid.clone());
        }
    }
    Some(known)
}

#[cfg(test)]
mod tests {
    use super::checkpoint;

    #[test]
    fn both_forms_of_the_checkpoint_are_understood_and_junk_says_nothing() {
        let by_numa = br#"{"Data":{"PodDeviceEntries":[{"PodUID":"u1","ContainerName":"c","ResourceName":"x.y/a",
            "DeviceIDs":{"0":["a-0"],"-1":["a-1"]},"AllocResp":""}],"RegisteredDevices":{}},"Checksum":1}"#;
        let flat = br#"{"Data":{"PodDeviceEntries":[{"PodUID":"u1","ContainerName":"c","ResourceName":"x.y/a",
            "DeviceIDs":["a-0","a-1"],"AllocResp":""}],"RegisteredDevices":null},"Checksum":1}"#;
        for text in [&by_numa[..], &flat[..]] {
            let known = checkpoint(text).unwrap();
            assert_eq!(known.len(), 2);
            assert_eq!(known[&("x.y/a".to_owned(), "a-1".to_owned())], "u1");
        }
        assert!(checkpoint(br#"{"Data":{"PodDeviceEntries":null}}"#).unwrap().is_empty());
        assert_eq!(checkpoint(b"junk"), None);
    }
}
