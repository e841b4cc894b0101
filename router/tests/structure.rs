//! The library's modules depend on each other one way.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// Bottom first: a module uses those of the layers below its own, and none beside it.
const LAYERS: [&[&str]; 15] = [
    &["alarm", "cores", "settled", "shutdown", "sync", "wire"],
    &["error"],
    &["names"],
    &["key"],
    &["config", "endpoint", "tree"],
    &["correct", "metrics", "upstream"],
    &["admission", "history", "policy"],
    &["fleet"],
    &["telemetry"],
    &["router"],
    &["discovery", "proxy", "stats"],
    &["admin", "body"],
    &["server"],
    &["handle"],
    &["cli"],
];

const TESTS: &str = "#[cfg(test)]\nmod tests {\n";

fn layer_of(module: &str) -> Option<usize> {
    LAYERS.iter().position(|modules| modules.contains(&module))
}

/// A file of the library.
struct Source {
    path: PathBuf,
    /// What leads to it from the root of the crate: `["proxy", "job"]`.
    module: Vec<String>,
}

impl Source {
    /// All that belong to a module.
    fn all() -> Vec<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let (mut folders, mut sources) = (vec![root.clone()], Vec::new());
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).expect("a folder of sources") {
                let path = entry.expect("an entry of it").path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let module = path.strip_prefix(&root).expect("it lies there").with_extension("");
                let mut module: Vec<_> =
                    module.iter().map(|name| name.to_string_lossy().into_owned()).collect();
                module.pop_if(|name| name == "mod");
                let is_root = module == ["lib"] || module == ["main"];
                if path.extension().is_some_and(|extension| extension == "rs") && !is_root {
                    sources.push(Self { path, module });
                }
            }
        }
        sources
    }

    fn top(&self) -> &str {
        &self.module[0]
    }

    /// The modules that its code uses. Tests may use any.
    fn uses(&self) -> BTreeSet<String> {
        let text = fs::read_to_string(&self.path).expect("a source");
        let (code, tests) = text.split_once(TESTS).unwrap_or((&text, "\n}\n"));
        let behind = tests.split_once("\n}\n").map(|(_, behind)| behind);
        assert_eq!(behind, Some(""), "{}: the tests come last", self.path.display());
        used(code, self.module.len())
    }
}

/// The modules of the crate that are named in `code`, which lies `depth` modules below its root.
fn used(code: &str, depth: usize) -> BTreeSet<String> {
    let uncommented: Vec<_> =
        code.lines().map(|line| line.split_once("//").map_or(line, |(code, _)| code)).collect();
    let code = uncommented.join("\n").replace(&"super::".repeat(depth), "crate::");
    code.split("crate::").skip(1).flat_map(first_names).map(str::to_owned).collect()
}

/// The first names of the paths at the beginning of `text`: of one, or of a list in braces.
fn first_names(text: &str) -> Vec<&str> {
    let Some(list) = text.strip_prefix('{') else {
        return vec![first_name(text)];
    };
    let (mut names, mut begins, mut depth) = (Vec::new(), 0, 1);
    for (at, character) in list.char_indices() {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 || depth == 1 && character == ',' {
            names.push(first_name(&list[begins..at]));
            begins = at + 1;
        }
        if depth == 0 {
            break;
        }
    }
    // A last comma has nothing behind it.
    names.retain(|name| !name.is_empty());
    names
}

fn first_name(path: &str) -> &str {
    let path = path.trim_start();
    let is_name = |character: char| character.is_alphanumeric() || character == '_';
    path.split(|character| !is_name(character)).next().unwrap_or_default()
}

#[test]
fn every_module_has_one_layer() {
    let mut layers: Vec<_> = LAYERS.concat();
    layers.sort_unstable();
    let sources = Source::all();
    let modules: BTreeSet<_> = sources.iter().map(Source::top).collect();
    assert_eq!(layers, modules.into_iter().collect::<Vec<_>>());
}

#[test]
fn dependencies_point_one_way() {
    let sources = Source::all();
    let wrong: Vec<_> = sources
        .iter()
        .flat_map(|source| source.uses().into_iter().map(move |used| (source, used)))
        .filter(|(source, used)| source.top() != used)
        // What is no module at all is a name that the root re-exports for others.
        .filter(|(source, used)| {
            layer_of(used).is_none_or(|used| Some(used) >= layer_of(source.top()))
        })
        .map(|(source, used)| format!("{} uses {used}", source.path.display()))
        .collect();
    assert!(wrong.is_empty(), "not from below:\n{}", wrong.join("\n"));
}

#[test]
fn paths_are_found_however_they_are_written() {
    let code = "
        use crate::{
            body::{self, worker::WorkerFrames},
            error::Error, // crate::nobody
            key,
        };
        pub(crate) use crate::metrics::labels;
        fn of(config: &crate::config::Config) {}
    ";
    let found = |code, depth| used(code, depth).into_iter().collect::<Vec<_>>().join(" ");
    assert_eq!(found(code, 2), "body config error key metrics");
    assert_eq!(found("use super::{policy, tree};", 1), "policy tree");
    assert_eq!(found("use super::queue; super::super::policy::of();", 2), "policy");
}
