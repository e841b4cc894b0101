//! The command line of the router, and its flags for programs that embed the router.

use std::{collections::BTreeMap, process::ExitCode};

use clap::{
    Arg, CommandFactory,
    builder::{PossibleValue, Str},
};
use mla_allocator::Returning;
use mla_router::{Config, cli, config::Ignored};
use pyo3::{
    exceptions::PyKeyboardInterrupt,
    prelude::*,
    types::{PyDict, PyList},
};

/// Returns name, value and help text of each flag, so that `launch_server` can offer them under other names.
#[pyfunction]
pub(crate) fn router_flags(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    let command = Config::command();
    let shown = command.get_arguments().filter(|flag| !flag.is_hide_set());
    let flags = shown.map(|flag| describe(py, flag));
    PyList::new(py, flags.collect::<PyResult<Vec<_>>>()?)
}

/// Flags of SGLang's router that are accepted without effect: name to reason.
#[pyfunction]
pub(crate) fn ignored_router_flags() -> BTreeMap<&'static str, &'static str> {
    let flags = Ignored::default().all().map(|(flag, _, why)| (flag.trim_start_matches('-'), why));
    flags.into()
}

fn describe<'py>(py: Python<'py>, flag: &Arg) -> PyResult<Bound<'py, PyDict>> {
    let takes_value = flag.get_action().takes_values();
    let value_names = flag.get_value_names().filter(|_| takes_value).unwrap_or_default();
    let defaults = flag.get_default_values();
    let default: Vec<_> = defaults.iter().map(|value| value.to_string_lossy()).collect();
    let values = flag.get_possible_values();
    let choices: Vec<_> =
        values.iter().filter(|_| takes_value).map(PossibleValue::get_name).collect();
    let described = PyDict::new(py);
    described.set_item("name", flag.get_long().expect("contract: every flag has a long name"))?;
    described.set_item("heading", flag.get_help_heading())?;
    described.set_item("value_name", value_names.first().map(Str::as_str))?;
    let list = flag.get_num_args().filter(|number| number.max_values() > 1);
    let nargs = list.map(|number| if number.min_values() == 0 { "*" } else { "+" });
    described.set_item("nargs", nargs)?;
    described
        .set_item("default", (takes_value && !default.is_empty()).then(|| default.join(" ")))?;
    described.set_item("help", flag.get_help().map_or_else(String::new, ToString::to_string))?;
    described.set_item("choices", choices)?;
    Ok(described)
}

/// Runs the `mla-router` command with these arguments. Returns its exit status.
#[pyfunction]
pub(crate) fn run_cli(py: Python<'_>, argv: Vec<String>) -> PyResult<u8> {
    let argv = std::iter::once("mla-router".to_owned()).chain(argv);
    // Like the binary.
    let _returning = Returning::start();
    let code = py.detach(|| cli::main(argv.map(Into::into)));
    // Python has recorded the Ctrl-C that ended the router; it must not raise it again.
    match py.check_signals() {
        Err(error) if !error.is_instance_of::<PyKeyboardInterrupt>(py) => return Err(error),
        _ => {}
    }
    Ok(match code {
        ExitCode::SUCCESS => 0,
        code if code == ExitCode::from(2) => 2,
        _ => 1,
    })
}
