//! The router as the Python module `mla_router._router`.
//!
//! A thin layer: it converts values and errors, and releases the interpreter while it waits.
//! `python/mla_router/_router.pyi` documents the module for readers and type checkers.

mod command;
mod config;
mod router;

pyo3::create_exception!(
    mla_router,
    RouterError,
    pyo3::exceptions::PyException,
    "An operation of the router has failed. The message is one line."
);

#[pyo3::pymodule]
mod _router {
    #[pymodule_export]
    use crate::{
        RouterError,
        command::{ignored_router_flags, router_flags, run_cli},
        config::RouterConfig,
        router::Router,
    };
}
