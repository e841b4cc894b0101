//! `RouterConfig`: the Rust `Config` with its fields as keyword arguments.
//!
//! Keyword arguments become flags, which clap parses. So name, type, range and default of a setting are written
//! only in the Rust `Config`, and an invalid value has the same message everywhere.

use clap::{Command, CommandFactory, FromArgMatches, builder::Resettable};
use mla_router::Config;
use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    prelude::*,
    types::{PyBool, PyDict, PyList, PyString, PyTuple},
};

/// All settings of a router. A setting that is missing or None has the default of the command line.
#[pyclass(frozen, eq, module = "mla_router")]
#[derive(PartialEq)]
pub(crate) struct RouterConfig {
    pub(crate) config: Config,
}

#[pymethods]
impl RouterConfig {
    #[new]
    #[pyo3(signature = (**settings))]
    fn new(settings: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let mut argv = Vec::new();
        for (name, value) in settings.into_iter().flatten() {
            push_flag(&mut argv, name.extract()?, &value)?;
        }
        // The settings of a program must not depend on the environment, and its lists may be empty.
        let command = Config::command().mut_args(|flag| {
            let is_list = flag.get_num_args().is_some_and(|number| number.max_values() > 1);
            let flag = flag.env(Resettable::Reset);
            if is_list { flag.num_args(0..) } else { flag }
        });
        read(command, argv)
    }

    /// Parses the command line `argv`, without the program name. Keys that it lacks are read from the environment.
    #[staticmethod]
    fn from_argv(argv: Vec<String>) -> PyResult<Self> {
        read(Config::command(), argv)
    }

    /// Returns all settings by name. `RouterConfig(**settings)` gives an equal config.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        Ok(pythonize::pythonize(py, &self.config)?.cast_into()?)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let mut fields = Vec::new();
        for (name, value) in self.to_dict(py)? {
            // Secrets must not appear in logs and tracebacks.
            let name: String = name.extract()?;
            let secret = name.ends_with("_key") && value.is_truthy()?;
            let value = if secret { "'***'".to_owned() } else { value.repr()?.to_string() };
            fields.push(format!("{name}={value}"));
        }
        Ok(format!("RouterConfig({})", fields.join(", ")))
    }
}

fn read(command: Command, argv: Vec<String>) -> PyResult<RouterConfig> {
    let argv = std::iter::once("mla-router".to_owned()).chain(argv);
    let matches = command.try_get_matches_from(argv);
    match matches.and_then(|matches| Config::from_arg_matches(&matches)) {
        Ok(config) => Ok(RouterConfig { config }),
        Err(error) => Err(PyValueError::new_err(first_line(&error))),
    }
}

/// Appends the keyword argument `name=value` as a flag.
fn push_flag(argv: &mut Vec<String>, name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
    let command = Config::command();
    let Some(known) = command.get_arguments().find(|known| known.get_id() == name) else {
        let message = format!("RouterConfig() got an unexpected keyword argument '{name}'");
        return Err(PyTypeError::new_err(message));
    };
    let is_bool = value.is_instance_of::<PyBool>();
    if !value.is_none() && known.get_action().takes_values() == is_bool {
        return Err(wrong_type(name, value)?);
    }
    let flag = format!("--{}", name.replace('_', "-"));
    let fits_one_flag = |value: &Bound<'_, PyAny>| -> PyResult<bool> {
        Ok(value.is_instance_of::<PyString>()
            || value.hasattr("__float__")?
            || value.hasattr("__fspath__")?)
    };
    if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        if value.is_empty()? {
            argv.push(flag);
            return Ok(());
        }
        for item in value.try_iter()? {
            argv.push(format!("{flag}={}", item?.str()?));
        }
    } else if value.is_none() {
        // None means the default.
    } else if is_bool {
        argv.extend(value.is_truthy()?.then_some(flag));
    } else if fits_one_flag(value)? {
        argv.push(format!("{flag}={}", value.str()?));
    } else {
        return Err(wrong_type(name, value)?);
    }
    Ok(())
}

fn wrong_type(name: &str, value: &Bound<'_, PyAny>) -> PyResult<PyErr> {
    let kind = value.get_type().name()?;
    Ok(PyTypeError::new_err(format!("RouterConfig() argument '{name}' cannot be of type {kind}")))
}

/// The message of clap without its prefix and its hint to `--help`.
fn first_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines = text.lines().map(str::trim).take_while(|line| !line.is_empty());
    let message = lines.collect::<Vec<_>>().join(" ");
    message.strip_prefix("error: ").unwrap_or(&message).to_owned()
}
