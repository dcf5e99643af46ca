//! The commands of `docs/TUTORIAL.md`, run as they stand, and what it says that they print.
//!
//! A block `sh` must succeed and a block `sh refused` must not; each line of a block `text` that
//! follows must come in the output. What is replaced is the image, which the lab cannot fetch, and
//! nothing else. The API server is told of the controller as `trust` does it, since the lab's
//! controller is no pod.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::exec::{capture, workspace};
use crate::k8s::cluster;
use crate::k8s::ours::GUEST_IMAGE;
use crate::k8s::test::Bench;
use crate::k8s::trust;

/// The longest that a block may take; the kubelet tells late that pods have ended.
const WAIT: Duration = Duration::from_secs(240);
const IMAGE: &str = "busybox:stable";

/// A block of the tutorial.
#[derive(Debug, PartialEq, Eq)]
struct Block {
    commands: String,
    refused: bool,
    prints: Vec<String>,
}

fn blocks(text: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut parts = text.split("\n```");
    parts.next();
    while let (Some(block), between) = (parts.next(), parts.next()) {
        let (kind, body) = block.split_once('\n').unwrap_or((block, ""));
        match kind {
            "sh" | "sh refused" => blocks.push(Block {
                commands: body.to_owned(),
                refused: kind == "sh refused",
                prints: Vec::new(),
            }),
            "text" => {
                if let Some(last) = blocks.last_mut() {
                    last.prints = body.lines().map(str::to_owned).collect();
                }
            }
            _ => {}
        }
        if between.is_none() {
            break;
        }
    }
    blocks
}

/// Every command of the tutorial, on a cluster that has the controller.
pub(crate) fn followed(bench: &mut Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    let kinds = kubectl.run(&["api-resources", "--api-group=vhost-rdma.io", "-o", "name"])?;
    if kinds.trim().is_empty() {
        cluster::installed(bench)?;
    }
    let done = trust::hooked(bench).and_then(|()| follow(bench));
    let unhooked = trust::unhooked(bench);
    done?;
    unhooked
}

fn follow(bench: &Bench<'_>) -> Result<()> {
    let text = fs::read_to_string(workspace().join("docs/TUTORIAL.md"))?;
    let blocks = blocks(&text);
    ensure!(blocks.len() >= 8, "the tutorial has {} blocks", blocks.len());
    for block in &blocks {
        run(bench, block).with_context(|| format!("in\n{}", block.commands))?;
    }
    Ok(())
}

/// The shell ends at the first command that fails, as in a script of a reader who is careful.
const STEP: &str = r#"
printf '%s\n' "$1" > /lab/trust/step.sh
export KUBECONFIG=/lab/pki/admin.kubeconfig
if sh -e /lab/trust/step.sh > /lab/trust/step.log 2>&1; then echo succeeded; else echo refused; fi
cat /lab/trust/step.log
"#;

fn run(bench: &Bench<'_>, block: &Block) -> Result<()> {
    let commands = block.commands.replace(IMAGE, GUEST_IMAGE);
    let mut command = bench.node.command("sh");
    let said = capture(command.args(["-ec", STEP, "sh", &commands]), WAIT)?;
    let wanted = if block.refused { "refused\n" } else { "succeeded\n" };
    ensure!(said.starts_with(wanted), "it says:\n{said}");
    for line in &block.prints {
        ensure!(said.contains(line), "it does not print {line:?}:\n{said}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_read_with_what_they_print() {
        let text =
            "a\n```sh\nx\n```\nb\n\n```text\ny\n```\n```console\n$ z\n```\n```sh refused\nq\n```\n";
        let found = blocks(text);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].commands, "x");
        assert_eq!(found[0].prints, ["y"]);
        assert!(found[1].refused && found[1].prints.is_empty());
    }

    #[test]
    fn the_tutorial_has_commands_and_what_they_print() {
        let text = fs::read_to_string(workspace().join("docs/TUTORIAL.md")).expect("a tutorial");
        let blocks = blocks(&text);
        assert!(blocks.iter().filter(|block| !block.prints.is_empty()).count() >= 8);
        assert_eq!(blocks.iter().filter(|block| block.refused).count(), 2);
    }
}
