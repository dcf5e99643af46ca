//! The README's table of figures, made from the newest recorded run of the demo and from nothing
//! else.

use std::fmt::Write as _;

use anyhow::{Context, Result};
use lab::scenarios::figures::FigureRow;
use serde_json::Value;

use crate::results::Run;

/// What is run for it.
const COMMAND: &str = "cargo xtask demo";
const BEGIN: &str = "<!-- figures: begin.";
const END: &str = "<!-- figures: end -->";

/// The table, with what must be said of the run.
pub(crate) fn table(runs: &[(String, Run)]) -> Result<String> {
    let demos = runs.iter().filter(|(_, run)| run.command == COMMAND);
    // Of one day the last: its file has the highest number.
    let newest = demos.max_by_key(|(file, run)| (run.date.clone(), file.len(), file.clone()));
    let Some((file, run)) = newest else {
        return Ok(format!("*No run of `{COMMAND}` is recorded.*\n"));
    };
    let mut text = String::from(
        "| | vhost-rdma | rxe | TCP | unit | CPU | CPU, rxe | CPU, TCP |\n\
         |---|---:|---:|---:|---|---:|---:|---:|\n",
    );
    let rows = run.rows.iter().filter(|row| row.contains_key("tcp"));
    for row in rows {
        let row: FigureRow = serde_json::from_value(Value::from_iter(row.clone()))?;
        let (rxe, tcp) = (row.rxe, row.tcp);
        let cells = [
            number(row.row.value),
            number(rxe.map(|cost| cost.value)),
            number(tcp.map(|cost| cost.value)),
            row.row.unit.clone(),
            micros(row.cpu_us),
            micros(rxe.map(|cost| cost.cpu_us)),
            micros(tcp.map(|cost| cost.cpu_us)),
        ];
        // Writing to a string cannot fail.
        let _ = writeln!(text, "| {} | {} |", row.row.name, cells.join(" | "));
    }
    let _ = writeln!(
        text,
        "\n*{}, commit {}, {}. [The run](docs/results/{file}).*",
        run.date,
        run.commit.as_deref().unwrap_or("unknown"),
        run.machine
    );
    Ok(text)
}

/// The README with another table.
pub(crate) fn put(readme: &str, table: &str) -> Result<String> {
    let missing = || format!("the README has no `{BEGIN}` and `{END}`");
    let (head, rest) = readme.split_once(BEGIN).with_context(missing)?;
    let (mark, rest) = rest.split_once('\n').with_context(missing)?;
    let (_, tail) = rest.split_once(END).with_context(missing)?;
    Ok(format!("{head}{BEGIN}{mark}\n{table}{END}{tail}"))
}

fn number(value: Option<f64>) -> String {
    match value {
        None => "–".into(),
        Some(v) if v >= 100.0 => format!("{v:.0}"),
        Some(v) if v >= 10.0 => format!("{v:.1}"),
        Some(v) if v >= 0.1 => format!("{v:.2}"),
        Some(v) => format!("{v:.4}"),
    }
}

fn micros(value: Option<f64>) -> String {
    value.map_or_else(|| "–".into(), |_| format!("{} us", number(value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(date: &str, value: f64) -> Run {
        serde_json::from_value(serde_json::json!({
            "date": date, "commit": "abc", "command": COMMAND, "machine": "m", "rows": [
                {"name": "ibv_devinfo", "ok": true},
                {"name": "x", "ok": true, "value": value, "reference": 1.0, "ratio": null,
                 "unit": "us", "target": "", "cpu_us": 0.05, "rxe": null,
                 "tcp": {"value": 250.4, "cpu_us": 12.34}},
            ],
        }))
        .unwrap()
    }

    #[test]
    fn the_last_run_of_the_newest_day_is_taken() {
        let runs = [
            ("d-2.json".to_owned(), run("2026-01-02", 2.0)),
            ("d-10.json".to_owned(), run("2026-01-02", 10.0)),
            ("e.json".to_owned(), run("2026-01-01", 1.0)),
        ];
        let text = table(&runs).unwrap();
        assert!(
            text.contains("\n| x | 10.0 | – | 250 | us | 0.0500 us | – | 12.3 us |\n"),
            "{text}"
        );
        assert!(text.contains("(docs/results/d-10.json)") && !text.contains("devinfo"), "{text}");
        assert!(table(&[]).unwrap().contains("No run"));
    }

    #[test]
    fn only_the_table_is_replaced() {
        let text = "a\n<!-- figures: begin. By x. -->\nold\n<!-- figures: end -->\nb\n";
        let made = put(text, "new\n").unwrap();
        assert_eq!(made, text.replace("old", "new"));
        assert_eq!(put(&made, "new\n").unwrap(), made);
        assert!(put("nothing", "new\n").is_err());
    }
}
