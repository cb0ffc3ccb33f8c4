//! Mechanisms broken on purpose are found before they are timed.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use longspan_bench::registry::Entry;
use longspan_bench::sweep::{OrderName, Settings, sweep};
use longspan_bench::{Error, conformance};
use longspan_kernels::{
    Algorithm, Call, Cotangent, Dims, Error as KernelError, Gradients, Kernel, KernelizedAttention, Mask, Mechanism,
    Order, Output, Parameters, Plan, Real, Reference, Score, Scratch, Shaw, State, Token,
};

/// What is wrong with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Nothing,
    /// Sees one key of the future.
    Leak,
    /// The first gradient of the queries is a little off.
    Gradient,
    /// The gradient of the parameters is never written.
    Parameters,
    /// Tokens come out as if the state were empty.
    Step,
    /// Refuses calls of more than 100 tokens.
    Refusal,
    /// Says that it does not do bidirectional masks, which is no fault.
    CausalOnly,
}

#[derive(Debug, Clone)]
struct Broken {
    inner: KernelizedAttention,
    fault: Fault,
    calls: Arc<AtomicUsize>,
}

impl Mechanism for Broken {
    fn name(&self) -> &'static str {
        "broken"
    }
    fn algorithms(&self) -> &'static [Algorithm] {
        &[Algorithm::Chunked]
    }
    fn parameters(&self, dims: &Dims) -> Parameters {
        self.inner.parameters(dims)
    }
    fn plan(&self, dims: &Dims, mask: &Mask<'_>) -> Result<Plan, KernelError> {
        self.inner.plan(dims, mask)
    }
    fn reference(&self, call: &Call<'_, f64>) -> Result<Reference, KernelError> {
        self.inner.reference(call)
    }
}

impl<T: Real> Kernel<T> for Broken
where
    KernelizedAttention: Kernel<T>,
{
    fn check(&self, call: &Call<'_, T>) -> Result<(), KernelError> {
        self.inner.check(call)
    }
    fn forward(&self, call: &Call<'_, T>, output: Output<'_, T>, scratch: &mut Scratch<T>) -> Result<(), KernelError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        if self.fault == Fault::CausalOnly && call.mask.order == Order::Bidirectional {
            return Err(KernelError::Unsupported {
                operation: "broken",
                combination: "a bidirectional mask",
                help: "use a causal one",
            });
        }
        if self.fault == Fault::Refusal && call.dims.queries > 100 {
            return Err(KernelError::Argument {
                operation: "broken",
                argument: "q",
                expected: "at most 100 tokens".into(),
                got: call.dims.queries.to_string(),
            });
        }
        let mut call = *call;
        if self.fault == Fault::Leak && call.mask.order == Order::Causal {
            call.mask.offset += 1;
        }
        self.inner.forward(&call, output, scratch)
    }
    fn backward(
        &self,
        call: &Call<'_, T>,
        cotangent: &Cotangent<'_, T>,
        mut gradients: Gradients<'_, '_, T>,
        scratch: &mut Scratch<T>,
    ) -> Result<(), KernelError> {
        let mut kept: Vec<Vec<T>> = gradients.parameters.iter().map(|p| p.to_vec()).collect();
        let mut parameters: Vec<&mut [T]> = if self.fault == Fault::Parameters {
            kept.iter_mut().map(Vec::as_mut_slice).collect()
        } else {
            gradients.parameters.iter_mut().map(|p| &mut **p).collect()
        };
        let inner = Gradients {
            dq: longspan_kernels::ViewMut::contiguous(gradients.dq.token(0, 0, 0, len(call.dims.q())), call.dims.q()),
            dk: longspan_kernels::ViewMut::contiguous(gradients.dk.token(0, 0, 0, len(call.dims.k())), call.dims.k()),
            dv: longspan_kernels::ViewMut::contiguous(gradients.dv.token(0, 0, 0, len(call.dims.v())), call.dims.v()),
            parameters: &mut parameters,
            initial_state: None,
        };
        self.inner.backward(call, cotangent, inner, scratch)?;
        if self.fault == Fault::Gradient {
            gradients.dq.token(0, 0, 0, 1)[0] += T::from_f64(0.01);
        }
        Ok(())
    }
    fn empty_state(&self, dims: &Dims) -> Result<State<T>, KernelError> {
        self.inner.empty_state(dims)
    }
    fn step(&self, token: &Token<'_, T>, state: &mut State<T>, out: &mut [T]) -> Result<(), KernelError> {
        if self.fault == Fault::Step {
            let shape = state.shape();
            *state = State::from_numbers(shape, vec![T::ZERO; state.numbers().len()])?;
        }
        self.inner.step(token, state, out)
    }
}

fn len(shape: [usize; 4]) -> usize {
    shape.iter().product()
}

/// The entry, and how often its kernels were called.
fn broken(fault: Fault) -> (Entry, Arc<AtomicUsize>) {
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&calls);
    let entry = Entry::new("broken", "Broken on purpose", move |algorithm, _| Broken {
        inner: KernelizedAttention { score: Score::Combined(Shaw::new(3)), algorithm, ..Default::default() },
        fault,
        calls: Arc::clone(&counter),
    });
    (entry, calls)
}

fn run(fault: Fault) -> Result<longspan_bench::sweep::Sweep, Error> {
    let settings = Settings { heads: 2, head_dim: 8, max_length: 64, seconds_per_point: 1e-4, ..Settings::default() };
    sweep(&[broken(fault).0], &settings, &mut |_| ControlFlow::Continue(()))
}

#[test]
fn what_is_right_is_measured() {
    let result = run(Fault::Nothing).unwrap();
    assert!(!result.rows.is_empty() && result.endings.is_empty());
}

#[test]
fn what_is_wrong_is_named_and_not_measured() {
    for (fault, parts) in [
        (Fault::Leak, ["broken by chunked, causal, 13 tokens", "output in f64"]),
        (Fault::Gradient, ["13 tokens", "gradient of q"]),
        (Fault::Parameters, ["13 tokens", "gradient of relative is not finite or not written"]),
        (Fault::Step, ["13 tokens", "output token by token"]),
        (Fault::Refusal, ["150 tokens", "refused a call that makes sense: broken: q: expected at most 100 tokens"]),
    ] {
        let error = run(fault).expect_err(&format!("{fault:?} went through"));
        assert!(matches!(error, Error::Wrong { .. }), "{error}");
        let text = error.to_string();
        for part in parts.into_iter().chain(["no speed is reported for a kernel that is wrong"]) {
            assert!(text.contains(part), "{fault:?}: {part} is not in: {text}");
        }
    }
}

#[test]
fn a_mask_that_is_not_offered_is_left_out_and_said() {
    let result = run(Fault::CausalOnly).unwrap();
    assert!(result.rows.iter().all(|row| row.order == OrderName::Causal) && !result.rows.is_empty());
    assert_eq!(result.endings.len(), 2, "forward and forward-backward");
    assert!(result.endings.iter().all(|ending| ending.order == OrderName::Bidirectional && ending.length == 0));
}

#[test]
fn the_registry_conforms() {
    for entry in longspan_bench::registry::registry() {
        for candidate in entry.candidates() {
            for order in [Order::Causal, Order::Bidirectional] {
                if let Err(error) = conformance::verify(&candidate, 16, order) {
                    panic!("{error}");
                }
            }
        }
    }
}

#[test]
fn checks_come_before_any_time_is_taken() {
    let (entry, calls) = broken(Fault::Leak);
    let mut labels = Vec::new();
    let result = sweep(&[entry], &Settings::default(), &mut |progress| {
        labels.push(progress.label.clone());
        ControlFlow::Continue(())
    });
    assert!(result.is_err());
    assert_eq!(labels, ["checking broken by chunked, causal"]);
    assert_eq!(calls.load(Ordering::Relaxed), 1, "one call showed it");
}
