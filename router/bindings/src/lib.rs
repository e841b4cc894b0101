//! The router as a Python module, `mla_router._router`.
//!
//! A thin skin: it converts values and errors, releases the interpreter while it waits, and decides
//! nothing. What it exports is described for people and type checkers in
//! `python/mla_router/_router.pyi`.

mod command;
mod config;
mod router;

pyo3::create_exception!(
    mla_router,
    RouterError,
    pyo3::exceptions::PyException,
    "The router cannot do what was asked; the message is one line."
);

#[pyo3::pymodule]
mod _router {
    #[pymodule_export]
    use crate::{
        RouterError,
        command::{router_flags, run_cli},
        config::RouterConfig,
        router::Router,
    };
}
