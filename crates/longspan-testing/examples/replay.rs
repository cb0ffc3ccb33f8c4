//! Whether a change keeps every bit: `record FILE` writes a hash of what each call of a fixed grid gives, `compare FILE` by a later build
//! says which differ. All mechanisms, masks and options, forward, backward, step and states, `f32` and `f64`, each instruction set of
//! the processor. The file is for one machine and one toolchain.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::process::{Command, ExitCode};

use longspan_kernels::aft::Variant;
use longspan_kernels::{
    Aft, Beyond, Bias, Dims, Error, FeatureMap, Gate, GatedAttention, Scratch, ShortConvolution, SoftmaxAttention,
    State, Toeplitz, Update,
};
use longspan_testing::grid::{self, LENGTHS};
use longspan_testing::{Assumptions, Case, KeyMask, Number, Subject, execute};

/// Every mechanism with calls of its own: each option meets many masks and sizes.
fn calls() -> Vec<(Subject, Case)> {
    let mut calls = Vec::new();
    let mut kernelized = grid::kernelized(1, 150, &LENGTHS);
    kernelized.extend(grid::row_maps(2, 60, &LENGTHS));
    kernelized.extend(grid::fourier(3, 60, &LENGTHS, true));
    kernelized.extend(grid::streaming(4, 60));
    // Several segments, fewer and more units than threads.
    let long = [(1, 1), (3, 1), (9, 3)].into_iter().cycle().zip(grid::kernelized(5, 12, &[2500]));
    kernelized.extend(long.map(|((heads, kv_heads), (mut attention, case))| {
        attention.decay = attention.decay.map(|_| vec![0.97; kv_heads]);
        (attention, Case { dims: Dims { heads, kv_heads, batch: 1, ..case.dims }, keys: KeyMask::All, ..case })
    }));
    for (n, (attention, case)) in kernelized.into_iter().enumerate() {
        let new = Assumptions::default();
        let channels = Case { dims: Dims { value_dim: case.dims.head_dim, ..case.dims }, ..case.clone() };
        let longest = case.dims.queries.max(case.dims.keys);
        let places = longest + case.offset.unsigned_abs() + 1;
        let bias = match n % 7 {
            0 => Bias::symmetric(places),
            1 => Bias::clipped([0, 3, 20, 70][n / 7 % 4]),
            2 => Bias::Table { first: -40, count: 1 + n % 5, beyond: Beyond::Extend },
            3 => Bias::Buckets { buckets: 8, max_distance: 20, bidirectional: true },
            4 => Bias::Buckets { buckets: 7, max_distance: 50, bidirectional: false },
            5 => Bias::Grid { height: places.div_ceil(9), width: 9 },
            _ => Bias::Table { first: -(places as isize), count: 2 * places, beyond: Beyond::Error },
        };
        let feature_map = if n % 5 == 0 { FeatureMap::Exp } else { attention.feature_map };
        let toeplitz = Toeplitz { feature_map, bias, normalize: attention.normalize, algorithm: Default::default() };
        for &algorithm in [Default::default()].iter().chain(longspan_kernels::Mechanism::algorithms(&toeplitz)) {
            calls.push((Subject::new(Toeplitz { algorithm, ..toeplitz.clone() }, new), case.clone()));
        }
        let taps = [1, 2, 3, 8, 20, 33][n / 4 % 6];
        let variant = match n % 6 {
            0 => Variant::Simple,
            1 => Variant::Full { length: places, rank: [None, Some(3)][n / 6 % 2] },
            2 => Variant::Local { window: taps, length: Some(places).filter(|_| n / 6 % 2 == 0) },
            3 => Variant::Conv2d { image: [longest.div_ceil(3).max(1), 3], taps: [3, 5], normalized: n % 4 < 2 },
            _ => Variant::Conv { taps, normalized: n % 4 < 2 },
        };
        let mut of_aft = channels.clone();
        if let Variant::Conv2d { image: [height, width], .. } = variant {
            (of_aft.dims.queries, of_aft.dims.keys, of_aft.keys) = (height * width, height * width, KeyMask::All);
            (of_aft.causal, of_aft.offset) = (false, 0);
        }
        calls.push((Subject::new(Aft { variant, gate: n % 5 > 0 }, new), of_aft));
        calls.push((
            Subject::new(ShortConvolution { width: 1 + n % 7, silu: n % 2 == 0, ..Default::default() }, new),
            channels.clone(),
        ));
        let window = [None, Some(1), Some(7), Some(70)][n % 4];
        let softmax = SoftmaxAttention { capacity: 2 * longest.max(1), window, ..Default::default() };
        calls.push((Subject::new(softmax, new), case.clone()));
        let update = if n % 3 == 0 { Update::Sum } else { Update::Delta };
        let gate = [Gate::Head, Gate::Channel, Gate::None][n / 3 % 3];
        let gated = GatedAttention { update, gate, l2_norm: n % 2 == 0, scale: None };
        let mut subject = Subject::new(gated, new);
        subject.prepare = std::sync::Arc::new(|parameter, numbers| {
            let range = |x: f64| if parameter.name == "log_decay" { -x.abs() } else { 0.01 + 0.005 * x.sin() };
            numbers.iter_mut().for_each(|x| *x = range(*x));
        });
        let square = Dims { queries: channels.dims.keys, ..channels.dims };
        calls.push((subject, Case { dims: square, causal: true, offset: 0, ..channels }));
        calls.push((Subject::kernelized(&attention), case));
    }
    calls
}

/// Hashes all numbers that a call and, where it can have them, its states and steps give.
fn hash<T: Number>(subject: &Subject, case: &Case, to: &mut DefaultHasher) -> Result<(), Error> {
    let mut take = |numbers: &[T]| numbers.iter().for_each(|x| x.bits().hash(to));
    let inputs = execute::random(subject, case).cast::<T>();
    let (forward, backward) = execute::both(subject, case, &inputs)?;
    [&forward.out, &forward.denominators].into_iter().chain(&backward.gradients).for_each(|x| take(x));
    let square = case.dims.queries == case.dims.keys && case.causal && case.offset == 0;
    if !square || matches!(case.keys, KeyMask::Packed { .. }) {
        return Ok(());
    }
    let kernel = T::mechanism(subject);
    let (_, first) = execute::forward_state(subject, case, &inputs, None)?;
    let (second, last) = execute::forward_state(subject, case, &inputs, Some(&first))?;
    let mut d_initial = kernel.empty_state(&case.dims)?;
    let states = (Some(&first), Some(&last), Some(&mut d_initial));
    let nan = T::from_f64(f64::NAN);
    let backward = execute::backward_through_states(subject, case, &inputs, &second, states, nan, &mut Scratch::new());
    let parameters: Vec<&[T]> = inputs.parameters.iter().map(Vec::as_slice).collect();
    let sum = kernel.combine(&first, &last, &parameters).and_then(|sum| {
        let gradients = kernel.combine_backward(&first, &last, &parameters, &sum)?;
        Ok((sum, gradients))
    });
    backward.iter().flat_map(|backward| &backward.gradients).for_each(|x| take(x));
    let mut state: State<T> = kernel.empty_state(&case.dims)?;
    take(&execute::steps(subject, case, &inputs, 0..case.dims.keys.min(40), &mut state)?);
    [&first, &last, &d_initial, &state].into_iter().for_each(|state| take(state.numbers()));
    format!("{:?}", (backward.err(), sum)).hash(to);
    Ok(())
}

/// One line for each call of one number type.
fn lines<T: Number>(set: &str, calls: &[(Subject, Case)]) -> Vec<String> {
    let line = |(n, (subject, case)): (usize, &(Subject, Case))| {
        let mut bits = DefaultHasher::new();
        let ended = hash::<T>(subject, case, &mut bits);
        let ended = ended.err().map_or(String::new(), |error| error.to_string());
        ended.hash(&mut bits);
        let (bits, number) = (bits.finish(), std::any::type_name::<T>());
        format!("{bits:016x} {set} {number} {n} {} {:?} {ended}", subject.label, case.dims)
    };
    calls.iter().enumerate().map(line).collect()
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [task, file] = arguments.as_slice() else { panic!("usage: replay record|compare FILE") };
    if task == "print" {
        let calls = calls();
        [lines::<f32>(file, &calls), lines::<f64>(file, &calls)].concat().iter().for_each(|line| println!("{line}"));
        return ExitCode::SUCCESS;
    }
    let mut all = String::new();
    for set in ["portable", "neon", "avx2", "avx512"] {
        // The choice of an instruction set is made once a process. One that is not there makes every call an error.
        let program = std::env::current_exe().expect("this program is a file");
        let mut command = Command::new(program);
        let output = command.args(["print", set]).env("LONGSPAN_SIMD", set).output().expect("can be started again");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        all.push_str(&String::from_utf8_lossy(&output.stdout));
    }
    if task == "record" {
        std::fs::write(file, all).expect("the file can be written");
        return ExitCode::SUCCESS;
    }
    let before = std::fs::read_to_string(file).expect("a file that `record` wrote");
    assert_eq!(all.lines().count(), before.lines().count(), "calls of another grid");
    let changed: Vec<_> = all.lines().zip(before.lines()).filter(|(now, then)| now != then).collect();
    changed.iter().take(20).for_each(|(now, _)| println!("{now}"));
    println!("{} of {} calls differ", changed.len(), all.lines().count());
    ExitCode::from(u8::from(!changed.is_empty()))
}
