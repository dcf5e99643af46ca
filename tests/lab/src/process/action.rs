//! The action for workflows (`examples/action.yml`) and the workflow beside it that uses it: what
//! they name is there, and their commands are run as they stand. What only fetches, or builds what
//! the lab has built, is done elsewhere ([`ELSEWHERE`]); what is replaced is the image.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::exec::{tied, workspace};

/// Where they are.
const FOLDER: &str = "vhost-rdma/process/examples";
/// Steps of the workflow that no test runs, and what does the same.
const ELSEWHERE: [(&str, &str); 5] = [
    ("packages", "the machine has them"),
    ("daemon", "`products::daemon`"),
    ("rdma-core", "`products::libraries`, from Debian's archive"),
    ("libraries", "`products::libraries`, by the same script"),
    ("image", "a root of Debian 12 with the same programs"),
];

/// A step of a job, or of an action.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) name: String,
    run: Option<String>,
    uses: Option<String>,
    with: BTreeMap<String, String>,
    env: BTreeMap<String, String>,
    shell: Option<String>,
}

fn read(name: &str) -> Result<Value> {
    let text = fs::read_to_string(workspace().join(FOLDER).join(name))?;
    serde_saphyr::from_str(&text).with_context(|| name.to_owned())
}

fn text(of: &Value, key: &str) -> Option<String> {
    of.get(key).and_then(Value::as_str).map(str::to_owned)
}

fn texts(of: &Value, key: &str) -> BTreeMap<String, String> {
    let all = of.get(key).and_then(Value::as_object).into_iter().flatten();
    all.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned()))).collect()
}

fn steps(of: &Value) -> Vec<Step> {
    let all = of.get("steps").and_then(Value::as_array).into_iter().flatten();
    let step = |step: &Value| Step {
        name: text(step, "name").unwrap_or_default(),
        run: text(step, "run"),
        uses: text(step, "uses"),
        with: texts(step, "with"),
        env: texts(step, "env"),
        shell: text(step, "shell"),
    };
    all.map(step).collect()
}

/// The workflow's steps, job by job in the order of the file.
fn workflow() -> Result<Vec<Step>> {
    let workflow = read("workflow.yml")?;
    let job = |name: &str| {
        let job = workflow.pointer(&format!("/jobs/{name}"));
        job.map(steps).with_context(|| format!("no job {name}"))
    };
    Ok(job("build")?.into_iter().chain(job("rdma")?).collect())
}

/// A step that this repository has: the folder of its action.
fn own_action(step: &Step) -> Option<PathBuf> {
    step.uses.as_deref()?.strip_prefix("./").map(|path| workspace().join(path))
}

/// The steps to be run, each with the commands that it comes to, in a folder that stands for the
/// runner's: `image` stands for the workflow's, and `env` is told to all.
pub(super) fn commands(
    dir: &Path,
    image: &str,
    env: &[(&str, &str)],
) -> Result<Vec<(String, Command)>> {
    let action = read("action.yml")?;
    let mut all = Vec::new();
    for step in workflow()? {
        if ELSEWHERE.iter().any(|(name, _)| *name == step.name) {
            continue;
        }
        if let Some(run) = &step.run {
            all.push((step.name.clone(), shell(dir, run)));
        }
        let Some(folder) = own_action(&step) else { continue };
        let runs = action.get("runs").context("an action that does nothing")?;
        for inner in steps(runs) {
            ensure!(inner.shell.as_deref() == Some("sh"), "{}: another shell", inner.name);
            let mut command = shell(dir, &inner.run.context("a step without a command")?);
            command.env("GITHUB_ACTION_PATH", &folder);
            for (name, value) in &inner.env {
                command.env(name, given(&action, &step, value)?);
            }
            command.env("IMAGE", image).envs(env.iter().copied());
            all.push((step.name.clone(), command));
        }
    }
    Ok(all)
}

/// As a runner starts `shell: sh`.
fn shell(dir: &Path, run: &str) -> Command {
    let mut command = tied("sh");
    command.args(["-ec", run]).current_dir(dir).env_remove("VHOST_RDMA_LIBRARIES");
    command
}

/// What a value comes to that is an input of the action: what the step gives, or the default.
fn given(action: &Value, step: &Step, value: &str) -> Result<String> {
    let Some(name) = input(value) else { return Ok(value.to_owned()) };
    let declared = action.pointer(&format!("/inputs/{name}"));
    let declared = declared.with_context(|| format!("there is no input {name}"))?;
    let told = step.with.get(name).cloned().or_else(|| text(declared, "default"));
    told.with_context(|| format!("{}: {name} is not given", step.name))
}

fn input(value: &str) -> Option<&str> {
    value.strip_prefix("${{ inputs.")?.strip_suffix(" }}")
}

/// What the workflow's first job would have built, in the runner's folder.
pub(super) fn built(dir: &Path, daemon: &Path, libraries: &Path) -> Result<()> {
    let release = dir.join("target/release");
    fs::create_dir_all(&release)?;
    fs::create_dir_all(dir.join("made"))?;
    for (from, to) in [(daemon, release.join("vhost-rdma")), (libraries, dir.join("made/lib"))] {
        let copied = Command::new("cp").arg("-a").arg(from).arg(&to).status()?;
        ensure!(copied.success(), "{} cannot be copied", from.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::vm::rundir::RunDir;

    fn is_program(path: &Path) -> bool {
        path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
    }

    #[test]
    fn an_action_has_what_a_runner_wants_of_it() {
        let action = read("action.yml").unwrap();
        let named = |key: &str| text(&action, key).is_some_and(|text| !text.is_empty());
        assert!(named("name") && named("description"));
        assert_eq!(action.pointer("/runs/using"), Some(&"composite".into()));
        let steps = steps(&action["runs"]);
        assert!(!steps.is_empty() && steps.iter().all(|step| step.run.is_some()));
        // Without it a composite action is refused.
        assert!(steps.iter().all(|step| step.shell.as_deref() == Some("sh")));
        let used: Vec<&str> =
            steps.iter().flat_map(|step| step.env.values()).filter_map(|it| input(it)).collect();
        for (name, declared) in action["inputs"].as_object().unwrap() {
            assert!(used.contains(&name.as_str()), "nothing uses {name}");
            assert!(text(declared, "description").is_some(), "{name}");
            let required = declared.get("required") == Some(&true.into());
            assert!(required != declared.get("default").is_some(), "{name}: one or the other");
        }
    }

    #[test]
    fn each_step_of_the_workflow_is_run_or_done_elsewhere_for_a_reason() {
        let steps = workflow().unwrap();
        let runs: Vec<&Step> = steps.iter().filter(|step| step.run.is_some()).collect();
        for (name, _) in ELSEWHERE {
            assert!(runs.iter().any(|step| step.name == name), "{name}");
        }
        assert!(runs.len() > ELSEWHERE.len(), "none is run");
        assert_eq!(steps.iter().filter(|step| own_action(step).is_some()).count(), 2);
        let action = read("action.yml").unwrap();
        for step in &steps {
            assert!(step.run.is_some() != step.uses.is_some(), "{step:?}");
            let Some(folder) = own_action(step) else { continue };
            assert!(folder.join("action.yml").is_file(), "{}", folder.display());
            for name in step.with.keys() {
                assert!(action["inputs"].get(name).is_some(), "there is no input {name}");
            }
        }
    }

    #[test]
    fn each_path_is_there_and_each_command_is_a_shells() {
        let action = read("action.yml").unwrap();
        let all = workflow().unwrap().into_iter().chain(steps(&action["runs"]));
        let mut paths = 0;
        for run in all.filter_map(|step| step.run) {
            let parsed = Command::new("sh").args(["-n", "-c", &run]).status().unwrap();
            assert!(parsed.success(), "{run}");
            for word in run.split_whitespace().map(|word| word.trim_matches('"')) {
                let word = word.replace("$GITHUB_ACTION_PATH", FOLDER);
                if word.starts_with("vhost-rdma/") {
                    assert!(is_program(&workspace().join(&word)), "{word}");
                    paths += 1;
                }
            }
        }
        assert_eq!(paths, 2, "the script that builds, and that of the containers");
    }

    /// All steps but those that are done elsewhere, in their order; what stands for the daemon says
    /// what it was told.
    #[test]
    fn the_steps_hand_on_what_they_are_given() {
        let dir = RunDir::new().unwrap();
        let [daemon, libraries] = ["stand-in", "libraries"].map(|name| dir.path().join(name));
        fs::create_dir(&libraries).unwrap();
        fs::write(libraries.join("libibverbs.so.1"), "").unwrap();
        fs::write(&daemon, "#!/bin/sh\nprintf '%s\\n' \"$@\" \"$CONTAINERS\"\n").unwrap();
        fs::set_permissions(&daemon, fs::Permissions::from_mode(0o755)).unwrap();
        built(dir.path(), &daemon, &libraries).unwrap();
        let mut said = Vec::new();
        for (name, mut command) in commands(dir.path(), "an image", &[]).unwrap() {
            let out = command.output().unwrap();
            assert!(out.status.success(), "{name}: {}", String::from_utf8_lossy(&out.stderr));
            said.push((name, String::from_utf8(out.stdout).unwrap()));
        }
        assert!(dir.path().join("prefix/lib/vhost-rdma/libibverbs.so.1").is_file());
        let names: Vec<&str> = said.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["pack", "unpack", "ib_write_bw", "rping"]);
        let script = workspace().join("vhost-rdma/process/examples/two-containers.sh");
        let wanted = format!(
            "run\n--nics\n2\n--\n{}\nan image\nrping -s -C 10\n\
             rping -c -a NIC_ADDRESS -C 10 -v\n\n",
            script.display()
        );
        assert_eq!(said[3].1, wanted);
    }
}
