//! The CDI specification of an ID: what a runtime adds to a container.

use serde_json::{Value, json};

use super::Gift;

/// The class of our CDI devices; the vendor is the resource domain.
pub const CDI_CLASS: &str = "nic";
/// The version of the CDI specification that has all we use; old runtimes refuse newer ones.
const CDI_VERSION: &str = "0.3.0";
/// The first that lets a device's name begin with a digit, as a PCI address does; under an older
/// version the whole file is invalid.
const CDI_VERSION_DIGIT: &str = "0.5.0";

/// The CDI name of an ID.
#[must_use]
pub fn cdi_name(prefix: &str, id: &str) -> String {
    format!("{prefix}/{CDI_CLASS}={id}")
}

/// The file name of an ID's CDI specification.
#[must_use]
pub fn cdi_file(prefix: &str, id: &str) -> String {
    format!("{prefix}-{CDI_CLASS}_{id}.json")
}

/// The CDI specification of an ID.
#[must_use]
pub fn cdi_spec(prefix: &str, gift: &Gift) -> Value {
    let mount = |(host, container): &(String, String), options: &[&str]| {
        json!({
            "hostPath": host, "containerPath": container, "options": options
        })
    };
    let plain = |pair| mount(pair, &["ro", "nosuid", "nodev", "noexec", "bind"]);
    let libraries =
        gift.libraries.iter().map(|pair| mount(pair, &["ro", "nosuid", "nodev", "bind"]));
    let mounts: Vec<Value> = gift.mounts.iter().map(plain).chain(libraries).collect();
    let nodes: Vec<Value> =
        gift.devices.iter().map(|path| json!({ "path": path, "permissions": "rw" })).collect();
    let digit = gift.id.starts_with(|first: char| first.is_ascii_digit());
    json!({
        "cdiVersion": if digit { CDI_VERSION_DIGIT } else { CDI_VERSION },
        "kind": format!("{prefix}/{CDI_CLASS}"),
        "devices": [{
            "name": gift.id,
            "containerEdits": { "mounts": mounts, "deviceNodes": nodes },
        }],
        "containerEdits": {},
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cdi_name_that_begins_with_a_digit_has_a_version_that_allows_it() {
        let version = |id: &str| {
            let gift = Gift { id: id.to_owned(), ..Gift::default() };
            cdi_spec("vhost-rdma.io", &gift)["cdiVersion"].clone()
        };
        assert_eq!(version("some-rxe0-0"), "0.3.0");
        assert_eq!(version("0000:41:10.4"), "0.5.0");
    }
}
