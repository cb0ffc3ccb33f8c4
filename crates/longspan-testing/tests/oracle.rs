//! The reference and the gradients against numbers of an independent NumPy transcription of the definitions
//! (`data/oracle.json`; q, k and tables are features already, so the feature map is the identity).

use longspan_kernels::{Dims, FeatureMap, KernelizedAttention, Score, Shaw};
use longspan_testing::{Case, Inputs, KeyMask, Subject, execute};

#[derive(serde::Deserialize)]
struct Sample {
    score: String,
    normalize: bool,
    radius: usize,
    causal: bool,
    offset: isize,
    queries: usize,
    keys: usize,
    head_dim: usize,
    value_dim: usize,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    table: Vec<f64>,
    ignored: Vec<bool>,
    out: Vec<f64>,
    d_out: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
    d_table: Vec<f64>,
}

fn samples() -> Vec<(Subject, Case, Inputs<f64>, Sample)> {
    let text = include_str!("../data/oracle.json");
    let samples: Vec<serde_json::Value> = serde_json::from_str(text).expect("the data file is JSON");
    assert!(samples.len() >= 16);
    samples
        .into_iter()
        .map(|value| {
            let sample: Sample = serde_json::from_value(value).expect("a sample");
            let shaw = Shaw { shared: true, ..Shaw::new(sample.radius) };
            let score = match sample.score.as_str() {
                "content" => Score::Content,
                "relative" => Score::Relative(shaw),
                _ => Score::Combined(shaw),
            };
            let attention = KernelizedAttention {
                feature_map: FeatureMap::Identity,
                score,
                normalize: sample.normalize,
                ..Default::default()
            };
            let (queries, keys) = (sample.queries, sample.keys);
            let (head_dim, value_dim) = (sample.head_dim, sample.value_dim);
            let dims = Dims { batch: 1, heads: 1, kv_heads: 1, queries, keys, head_dim, value_dim };
            let case = Case {
                offset: sample.offset,
                keys: KeyMask::Padding(sample.ignored.clone()),
                ..Case::new(dims, sample.causal)
            };
            let d_out = if sample.d_out.is_empty() { vec![0.0; sample.out.len()] } else { sample.d_out.clone() };
            let parameters = if score == Score::Content { Vec::new() } else { vec![sample.table.clone()] };
            let inputs = Inputs {
                q: sample.q.clone(),
                k: sample.k.clone(),
                v: sample.v.clone(),
                per_key: vec![0; parameters.len()],
                parameters,
                d_out,
            };
            (Subject::kernelized(&attention), case, inputs, sample)
        })
        .collect()
}

#[track_caller]
fn near(what: &str, case: &Case, got: &[f64], expected: &[f64]) {
    assert_eq!(got.len(), expected.len(), "{what} of {case:?}");
    for (n, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!((got - expected).abs() <= 1e-12 * (1.0 + expected.abs()), "{what} {n}: {got} {expected} {case:?}");
    }
}

#[test]
fn the_reference_gives_the_oracle_s_numbers() {
    for (subject, case, inputs, sample) in samples() {
        let reference = execute::reference(&subject, &case, &inputs).expect("a call that makes sense");
        near("out", &case, &reference.out, &sample.out);
    }
}

#[test]
fn the_kernels_give_the_oracle_s_numbers() {
    for (subject, case, inputs, sample) in samples() {
        let forward = execute::forward(&subject, &case, &inputs).expect("a call that makes sense");
        near("out", &case, &forward.out, &sample.out);
        if sample.d_out.is_empty() {
            continue;
        }
        let backward = execute::backward(&subject, &case, &inputs, &forward).expect("a call that makes sense");
        near("dq", &case, &backward.gradients[0], &sample.dq);
        near("dk", &case, &backward.gradients[1], &sample.dk);
        near("dv", &case, &backward.gradients[2], &sample.dv);
        if let Some(d_table) = backward.gradients.get(3) {
            near("gradient of the table", &case, d_table, &sample.d_table);
        }
    }
}
