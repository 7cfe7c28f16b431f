//! A syntax tree to a typed program: declarations, operands and the order of lowering. What instructions
//! become is in the other files of this folder.

use super::form::Form;
use super::op::{Function, Inst, Op, Predicate, Program};
use super::scope::{Name, Scope};
use crate::ptx::{self, Instruction, Module, Operand, PtxError, Space, Statement, Variable};
use std::collections::HashMap;

pub(crate) type Result<T> = std::result::Result<T, PtxError>;

/// Addresses of a module's variables in device memory.
pub(crate) type Addresses = HashMap<String, u64>;

/// The variables of a module that need device memory: each with its offset in one allocation.
pub(crate) struct Placement {
    pub(crate) offsets: Vec<(String, u64)>,
    pub(crate) bytes: u64,
    /// The first byte of constants, which come last.
    pub(crate) constant: u64,
}

impl Placement {
    /// Lays out global and constant variables, those within functions included.
    pub(crate) fn of(module: &Module) -> Placement {
        let mut placement = Placement { offsets: Vec::new(), bytes: 0, constant: 0 };
        placement.add(module, Space::Global);
        placement.constant = placement.bytes;
        placement.add(module, Space::Const);
        placement
    }

    fn add(&mut self, module: &Module, space: Space) {
        for variable in device_variables(module).filter(|it| it.space == space) {
            let at = self.bytes.next_multiple_of(u64::from(variable.align.max(16)));
            self.offsets.push((variable.name.clone(), at));
            self.bytes = at + u64::from(variable.bytes.unwrap_or(0));
        }
    }
}

/// Global and constant variables.
pub(crate) fn device_variables(module: &Module) -> impl Iterator<Item = &Variable> {
    let inner = module.functions.iter().flat_map(|function| function.body.iter().flatten());
    let inner = inner.filter_map(|statement| match statement {
        Statement::Variable(variable) => Some(variable),
        _ => None,
    });
    module.variables.iter().chain(inner).filter(|it| matches!(it.space, Space::Global | Space::Const))
}

/// Lowers a module whose variables lie at `addresses`.
///
/// # Errors
/// Unknown opcodes, modifiers, operands and names, with their line.
pub(crate) fn lower(module: &Module, addresses: &Addresses) -> Result<Program> {
    let mut program = Program { target: module.target, version: module.version, ..Program::default() };
    program.pool.extend([[0; 32]; 2]);
    let mut constants = HashMap::from([(0u64, 0u32)]);
    let defined: Vec<&ptx::Function> = module.functions.iter().filter(|it| it.body.is_some()).collect();
    let indices = defined.iter().enumerate().map(|(at, it)| (it.name.as_str(), at as u32)).collect();
    let common = Common::of(module, &defined);
    for function in &defined {
        let mut lowering = Lowering {
            program: &mut program,
            constants: &mut constants,
            functions: &indices,
            addresses,
            common: &common,
            scope: Scope::new(),
            local: 0,
            shared: 0,
            shared_vars: Vec::new(),
            fixups: Vec::new(),
            guard: None,
            line: function.line,
        };
        let lowered = lowering.function(function)?;
        program.functions.push(lowered);
    }
    Ok(program)
}

/// Shared memory of module scope and of device functions, which comes before a kernel's own.
pub(super) struct Common {
    pub(super) offsets: HashMap<String, u32>,
    pub(super) external: Vec<String>,
    bytes: u32,
}

impl Common {
    fn of(module: &Module, functions: &[&ptx::Function]) -> Common {
        let mut common = Common { offsets: HashMap::new(), external: Vec::new(), bytes: 0 };
        let inner = functions.iter().filter(|it| !it.entry).flat_map(|it| it.body.iter().flatten());
        let inner = inner.filter_map(|it| match it {
            Statement::Variable(variable) => Some(variable),
            _ => None,
        });
        for variable in module.variables.iter().chain(inner).filter(|it| it.space == Space::Shared) {
            match variable.bytes {
                Some(bytes) if !variable.external => {
                    let at = common.bytes.next_multiple_of(variable.align.max(1));
                    common.offsets.insert(variable.name.clone(), at);
                    common.bytes = at + bytes;
                }
                _ => common.external.push(variable.name.clone()),
            }
        }
        common
    }
}

/// An instruction whose targets are labels.
struct Fixup {
    at: usize,
    block: usize,
    label: String,
    line: u32,
}

/// The state of lowering one function.
pub(crate) struct Lowering<'a> {
    pub(super) program: &'a mut Program,
    pub(super) constants: &'a mut HashMap<u64, u32>,
    pub(super) functions: &'a HashMap<&'a str, u32>,
    pub(super) addresses: &'a Addresses,
    pub(super) common: &'a Common,
    pub(crate) scope: Scope,
    local: u32,
    pub(super) shared: u32,
    shared_vars: Vec<(String, u32)>,
    fixups: Vec<Fixup>,
    guard: Option<Predicate>,
    pub(crate) line: u32,
}

/// Bytes that static shared memory is rounded up to, where dynamic shared memory begins.
pub(super) const DYNAMIC_ALIGN: u32 = 128;

impl Lowering<'_> {
    fn function(&mut self, function: &ptx::Function) -> Result<Function> {
        let start = self.program.code.len() as u32;
        let statements = function.body.as_deref().unwrap_or(&[]);
        let returns = self.params(&function.returns, false);
        let params = self.params(&function.params, function.entry);
        let uses_common = statements.iter().any(|it| self.touches_common(it));
        if function.entry {
            self.shared = if uses_common { self.common.bytes } else { 0 };
            self.shared_variables(statements);
        }
        for statement in statements {
            self.statement(statement)?;
        }
        self.guard = None;
        self.emit(if function.entry { Op::Exit } else { Op::Return });
        self.resolve()?;
        Ok(Function {
            name: function.name.clone(),
            entry: function.entry,
            start,
            planes: self.scope.planes,
            predicates: self.scope.predicates,
            local: self.local.next_multiple_of(16),
            specials: std::mem::take(&mut self.scope.specials),
            params,
            returns,
            shared: self.shared,
            max_threads: function.max_threads,
            required_threads: function.required_threads,
        })
    }

    /// Declares parameters; gives their offsets and sizes.
    fn params(&mut self, params: &[Variable], entry: bool) -> Vec<(u32, u32)> {
        let mut at = 0;
        let mut places = Vec::new();
        for param in params {
            let bytes = param.bytes.unwrap_or(0);
            if entry {
                at = u32::next_multiple_of(at, param.align.max(1));
                self.scope.declare(&param.name, Name::KernelParam(at, bytes));
                places.push((at, bytes));
                at += bytes;
            } else {
                let place = self.frame_variable(param);
                places.push((place, bytes));
            }
        }
        places
    }

    /// Places a variable in the frame's local memory; gives its offset. Words are not shared between
    /// variables.
    fn frame_variable(&mut self, variable: &Variable) -> u32 {
        let bytes = variable.bytes.unwrap_or(0);
        let at = self.local.next_multiple_of(variable.align.max(4));
        self.local = at + bytes;
        self.scope.declare(&variable.name, Name::Local(at, bytes));
        at
    }

    /// Lays out a kernel's own shared variables, so that dynamic shared memory is known to begin behind them.
    fn shared_variables(&mut self, statements: &[Statement]) {
        for statement in statements {
            let Statement::Variable(variable) = statement else { continue };
            if let (Space::Shared, Some(bytes)) = (variable.space, variable.bytes) {
                let at = self.shared.next_multiple_of(variable.align.max(1));
                self.shared_vars.push((variable.name.clone(), at));
                self.shared = at + bytes;
            }
        }
    }

    fn touches_common(&self, statement: &Statement) -> bool {
        let Statement::Instruction(instruction) = statement else { return false };
        fn names<'a>(operand: &'a Operand, found: &mut Vec<&'a str>) {
            match operand {
                Operand::Word(name) | Operand::Sum(name, _) => found.push(name),
                Operand::Address(base, _) | Operand::Not(base) => names(base, found),
                Operand::Vector(list) | Operand::List(list) => list.iter().for_each(|it| names(it, found)),
                Operand::Pair(a, b) => {
                    names(a, found);
                    names(b, found);
                }
                _ => {}
            }
        }
        let mut found = Vec::new();
        instruction.operands.iter().for_each(|it| names(it, &mut found));
        let calls = instruction.opcode.starts_with("call") && !found.contains(&"vprintf");
        calls || found.iter().any(|name| self.common.offsets.contains_key(*name))
    }

    fn statement(&mut self, statement: &Statement) -> Result<()> {
        match statement {
            Statement::Open => self.scope.open(),
            Statement::Close => self.scope.close(),
            Statement::Registers { ty, name, count } => self.scope.registers(*ty, name, *count),
            Statement::Label(name) => {
                let at = self.program.code.len() as u32;
                self.scope.label(name, at);
            }
            Statement::Targets { name, labels } => self.scope.branch_targets(name, labels),
            Statement::Variable(variable) => match variable.space {
                Space::Local | Space::Param => _ = self.frame_variable(variable),
                Space::Shared => {
                    let own = self.shared_vars.iter().find(|(name, _)| *name == variable.name);
                    let at = own.map(|(_, at)| *at).or(self.common.offsets.get(&variable.name).copied());
                    self.scope.declare(&variable.name, Name::Shared(at.unwrap_or(0)));
                }
                Space::Global | Space::Const => {}
            },
            Statement::Instruction(instruction) => self.instruction(instruction)?,
        }
        Ok(())
    }

    fn instruction(&mut self, instruction: &Instruction) -> Result<()> {
        self.line = instruction.line;
        self.guard = match &instruction.guard {
            Some((name, negated)) => {
                Some(Predicate { index: self.predicate_register(name)?, negated: *negated })
            }
            None => None,
        };
        let mut form = Form::new(&instruction.opcode, instruction.line);
        let operands = &instruction.operands[..];
        if form.base == "mov" {
            self.mov(&mut form, operands)?;
            return form.finish();
        }
        let known = self.alu(&mut form, operands)?
            || self.conversion(&mut form, operands)?
            || self.memory(&mut form, operands)?
            || self.tensor(&mut form, operands)?
            || self.warp(&mut form, operands)?
            || self.control(&mut form, operands)?;
        if !known {
            return Err(PtxError::new(form.line, format!("unknown opcode '{}'", form.opcode)));
        }
        form.finish()
    }

    /// Appends an instruction with the guard and line of the statement at hand.
    pub(crate) fn emit(&mut self, op: Op) {
        self.program.code.push(Inst { op, guard: self.guard, line: self.line });
    }

    /// Appends a branch to a label.
    pub(crate) fn emit_branch(&mut self, op: Op, label: &str) {
        let (at, block) = (self.program.code.len(), self.scope.current);
        self.fixups.push(Fixup { at, block, label: label.to_owned(), line: self.line });
        self.emit(op);
    }

    fn resolve(&mut self) -> Result<()> {
        for fixup in std::mem::take(&mut self.fixups) {
            let missing = |name: &str| PtxError::new(fixup.line, format!("unknown label '{name}'"));
            let find = |name: &str| self.scope.find_label(fixup.block, name).ok_or_else(|| missing(name));
            match &mut self.program.code[fixup.at].op {
                Op::Branch { target } => *target = find(&fixup.label)?,
                Op::BranchIndexed { targets, .. } => {
                    let labels = self.scope.find_targets(fixup.block, &fixup.label);
                    let labels = labels.ok_or_else(|| missing(&fixup.label))?;
                    *targets = labels.iter().map(|name| find(name)).collect::<Result<_>>()?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// An error at the statement at hand.
    pub(crate) fn error(&self, problem: impl Into<String>) -> PtxError {
        PtxError::new(self.line, problem)
    }

    /// The index of a device function.
    pub(crate) fn function_index(&self, name: &str) -> Option<u32> {
        self.functions.get(name).copied()
    }
}
