//! Tokens to a syntax tree (PTX ISA, sections 4, 5 and 11).

use super::PtxError;
use super::lexer::{Token, tokens};
use super::tree::{Function, Instruction, Module, Operand, Space, Statement, Type, Value, Variable};

type Result<T> = std::result::Result<T, PtxError>;

/// Reads a module.
///
/// # Errors
/// Malformed text and unknown directives, with their line.
pub(crate) fn parse(text: &str) -> Result<Module> {
    let tokens = tokens(text)?;
    let mut parser = Parser { tokens, at: 0 };
    let mut module = Module { version: 0, target: 0, variables: Vec::new(), functions: Vec::new() };
    while parser.at < parser.tokens.len() {
        parser.item(&mut module)?;
    }
    if module.version == 0 {
        return Err(PtxError::new(1, "the module has no .version"));
    }
    Ok(module)
}

struct Parser<'a> {
    tokens: Vec<(Token<'a>, u32)>,
    at: usize,
}

impl<'a> Parser<'a> {
    fn line(&self) -> u32 {
        let last = self.tokens.len().saturating_sub(1);
        self.tokens.get(self.at.min(last)).map_or(1, |(_, line)| *line)
    }

    fn error<T>(&self, problem: impl Into<String>) -> Result<T> {
        Err(PtxError::new(self.line(), problem))
    }

    fn peek(&self) -> Option<&Token<'a>> {
        self.tokens.get(self.at).map(|(token, _)| token)
    }

    fn is_mark(&self, mark: u8) -> bool {
        self.peek() == Some(&Token::Mark(mark))
    }

    fn eat(&mut self, mark: u8) -> bool {
        let found = self.is_mark(mark);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, mark: u8) -> Result<()> {
        if self.eat(mark) { Ok(()) } else { self.error(format!("expected '{}'", mark as char)) }
    }

    fn peek_word(&self) -> Option<&'a str> {
        match self.peek() {
            Some(Token::Word(word)) => Some(word),
            _ => None,
        }
    }

    fn word(&mut self) -> Result<&'a str> {
        let Some(word) = self.peek_word() else { return self.error("expected a name") };
        self.at += 1;
        Ok(word)
    }

    fn int(&mut self) -> Result<u64> {
        let negative = self.eat(b'-');
        let Some(Token::Int(value)) = self.peek() else { return self.error("expected an integer") };
        let value = *value;
        self.at += 1;
        Ok(if negative { value.wrapping_neg() } else { value })
    }

    /// The value as 32 bits; sizes and counts are no larger.
    fn count(&mut self) -> Result<u32> {
        let value = self.int()?;
        u32::try_from(value).or_else(|_| self.error(format!("{value} is too large")))
    }

    fn item(&mut self, module: &mut Module) -> Result<()> {
        let mut external = false;
        while let Some(".visible" | ".weak" | ".extern" | ".common") = self.peek_word() {
            external |= self.word()? == ".extern";
        }
        match self.word()? {
            ".version" => {
                let major = self.count()?;
                self.expect(b'.')?;
                let minor = self.count()?;
                module.version = major * 10 + minor;
            }
            ".target" => {
                let name = self.word()?;
                let digits: String = name.chars().filter(char::is_ascii_digit).collect();
                module.target = digits.parse().unwrap_or(0);
                while self.eat(b',') {
                    self.word()?;
                }
            }
            ".address_size" => {
                if self.count()? != 64 {
                    return self.error("only .address_size 64 is known");
                }
            }
            ".file" => self.skip_line(),
            ".section" => self.skip_block()?,
            ".entry" => {
                let function = self.function(true)?;
                module.functions.push(function);
            }
            ".func" => {
                let function = self.function(false)?;
                module.functions.push(function);
            }
            space @ (".global" | ".const" | ".shared") => {
                let mut variable = self.variable(space)?;
                variable.external |= external;
                module.variables.push(variable);
                self.expect(b';')?;
            }
            word => return self.error(format!("unknown directive '{word}'")),
        }
        Ok(())
    }

    fn skip_line(&mut self) {
        let line = self.tokens[self.at - 1].1;
        while self.tokens.get(self.at).is_some_and(|(_, here)| *here == line) {
            self.at += 1;
        }
    }

    fn skip_block(&mut self) -> Result<()> {
        while !self.eat(b'{') {
            self.at += 1;
            if self.at >= self.tokens.len() {
                return self.error("a section has no block");
            }
        }
        while !self.eat(b'}') {
            self.at += 1;
            if self.at >= self.tokens.len() {
                return self.error("a section has no end");
            }
        }
        Ok(())
    }

    fn function(&mut self, entry: bool) -> Result<Function> {
        let line = self.line();
        let returns = if self.is_mark(b'(') { self.params()? } else { Vec::new() };
        let name = self.word()?.to_owned();
        let params = if self.is_mark(b'(') { self.params()? } else { Vec::new() };
        let mut function = Function {
            name,
            entry,
            returns,
            params,
            body: None,
            max_threads: None,
            required_threads: None,
            line,
        };
        while let Some(word) = self.peek_word() {
            self.at += 1;
            match word {
                ".maxntid" | ".reqntid" => {
                    let mut dims = [1; 3];
                    for (at, dim) in dims.iter_mut().enumerate() {
                        if at == 0 || self.eat(b',') {
                            *dim = self.count()?;
                        }
                    }
                    function.max_threads = Some(dims[0].saturating_mul(dims[1]).saturating_mul(dims[2]));
                    if word == ".reqntid" {
                        function.required_threads = Some(dims);
                    }
                }
                ".minnctapersm" | ".maxnreg" | ".maxnctapersm" => _ = self.count()?,
                ".noreturn" => {}
                ".pragma" => {
                    self.at += 1;
                    self.eat(b';');
                }
                _ => return self.error(format!("unknown directive '{word}' of a function")),
            }
        }
        if !self.eat(b';') {
            self.expect(b'{')?;
            function.body = Some(self.body()?);
        }
        Ok(function)
    }

    fn params(&mut self) -> Result<Vec<Variable>> {
        self.expect(b'(')?;
        let mut params = Vec::new();
        while !self.eat(b')') {
            match self.word()? {
                space @ (".param" | ".reg") => params.push(self.variable(space)?),
                word => return self.error(format!("unknown directive '{word}' of a parameter")),
            }
            self.eat(b',');
        }
        Ok(params)
    }

    /// A variable behind its space: alignment, type, name, size and initializer.
    fn variable(&mut self, space: &str) -> Result<Variable> {
        let line = self.line();
        let space = match space {
            ".global" => Space::Global,
            ".const" => Space::Const,
            ".shared" => Space::Shared,
            ".local" => Space::Local,
            ".param" => Space::Param,
            _ => return self.error(format!("variables in '{space}' are unknown here")),
        };
        let (mut align, mut ty, mut lanes) = (0, None, 1);
        while let Some(word) = self.peek_word().filter(|word| word.starts_with('.')) {
            self.at += 1;
            match word {
                ".align" => align = self.count()?,
                ".v2" => lanes = 2,
                ".v4" => lanes = 4,
                ".ptr" | ".global" | ".shared" | ".const" | ".local" | ".attribute" => {}
                _ => match Type::named(&word[1..]) {
                    Some(found) => ty = Some(found),
                    None => return self.error(format!("unknown type '{word}'")),
                },
            }
        }
        let Some(ty) = ty else { return self.error("a variable has no type") };
        let name = self.word()?.to_owned();
        let mut elements = Some(lanes);
        while self.eat(b'[') {
            elements = match (elements, self.is_mark(b']')) {
                (Some(count), false) => Some(count * self.count()?),
                _ => None,
            };
            self.expect(b']')?;
        }
        let bytes = elements.map(|count| count * ty.bytes());
        let init = if self.eat(b'=') { self.initializer()? } else { Vec::new() };
        let bytes = bytes.or((!init.is_empty()).then(|| init.len() as u32 * ty.bytes()));
        let align = align.max(ty.bytes() * lanes);
        Ok(Variable { space, ty, align, name, bytes, init, external: false, line })
    }

    fn initializer(&mut self) -> Result<Vec<Value>> {
        if !self.eat(b'{') {
            return Ok(vec![self.value()?]);
        }
        let mut values = Vec::new();
        while !self.eat(b'}') {
            if self.is_mark(b'{') {
                values.extend(self.initializer()?);
            } else {
                values.push(self.value()?);
            }
            self.eat(b',');
        }
        Ok(values)
    }

    fn value(&mut self) -> Result<Value> {
        match self.peek().cloned() {
            Some(Token::Single(bits)) => {
                self.at += 1;
                Ok(Value::Bits(u64::from(bits)))
            }
            Some(Token::Double(bits)) => {
                self.at += 1;
                Ok(Value::Bits(bits))
            }
            Some(Token::Word(word)) => {
                let generic = word == "generic";
                self.at += 1;
                let mut name = word.to_owned();
                if generic {
                    self.expect(b'(')?;
                    name = self.word()?.to_owned();
                    self.expect(b')')?;
                }
                let offset = if self.eat(b'+') { self.int()? as i64 } else { 0 };
                Ok(Value::Address { name, offset, generic })
            }
            _ => Ok(Value::Bits(self.int()?)),
        }
    }

    fn body(&mut self) -> Result<Vec<Statement>> {
        let (mut statements, mut depth) = (Vec::new(), 0);
        loop {
            if self.at >= self.tokens.len() {
                return self.error("a function has no end");
            }
            if self.eat(b'{') {
                depth += 1;
                statements.push(Statement::Open);
            } else if self.eat(b'}') {
                if depth == 0 {
                    return Ok(statements);
                }
                depth -= 1;
                statements.push(Statement::Close);
            } else if !self.eat(b';') {
                self.statement(&mut statements)?;
            }
        }
    }

    fn statement(&mut self, statements: &mut Vec<Statement>) -> Result<()> {
        let line = self.line();
        let guard = if self.eat(b'@') {
            let negated = self.eat(b'!');
            Some((self.word()?.to_owned(), negated))
        } else {
            None
        };
        let word = self.word()?;
        if word.starts_with('.') {
            return self.directive(word, statements);
        }
        if guard.is_none() && self.eat(b':') {
            return match self.peek_word() {
                Some(".branchtargets") => {
                    self.at += 1;
                    let mut labels = vec![self.word()?.to_owned()];
                    while self.eat(b',') {
                        labels.push(self.word()?.to_owned());
                    }
                    statements.push(Statement::Targets { name: word.to_owned(), labels });
                    self.expect(b';')
                }
                Some(".callprototype") => {
                    while !self.eat(b';') {
                        self.at += 1;
                    }
                    Ok(())
                }
                _ => {
                    statements.push(Statement::Label(word.to_owned()));
                    Ok(())
                }
            };
        }
        let mut operands = Vec::new();
        while !self.eat(b';') {
            let named = |error: PtxError| PtxError::new(error.line, format!("'{word}': {}", error.problem));
            operands.push(self.operand().map_err(named)?);
            if !self.eat(b',') && !self.is_mark(b';') {
                return self.error(format!("'{word}': expected ',' or ';'"));
            }
        }
        statements.push(Statement::Instruction(Instruction {
            guard,
            opcode: word.to_owned(),
            operands,
            line,
        }));
        Ok(())
    }

    fn directive(&mut self, word: &str, statements: &mut Vec<Statement>) -> Result<()> {
        match word {
            ".reg" => {
                let Some(ty) = Type::named(self.word()?.trim_start_matches('.')) else {
                    return self.error("registers of an unknown type");
                };
                loop {
                    let name = self.word()?.to_owned();
                    let count = if self.eat(b'<') {
                        let count = self.count()?;
                        self.expect(b'>')?;
                        Some(count)
                    } else {
                        None
                    };
                    statements.push(Statement::Registers { ty, name, count });
                    if !self.eat(b',') {
                        break;
                    }
                }
                self.expect(b';')
            }
            ".shared" | ".local" | ".param" | ".global" | ".const" => {
                let variable = self.variable(word)?;
                statements.push(Statement::Variable(variable));
                self.expect(b';')
            }
            ".pragma" => {
                self.at += 1;
                self.expect(b';')
            }
            ".loc" => {
                self.skip_line();
                Ok(())
            }
            _ => self.error(format!("unknown directive '{word}'")),
        }
    }

    fn operand(&mut self) -> Result<Operand> {
        let first = self.simple_operand()?;
        if self.eat(b'|') {
            let second = self.simple_operand()?;
            return Ok(Operand::Pair(Box::new(first), Box::new(second)));
        }
        Ok(first)
    }

    fn simple_operand(&mut self) -> Result<Operand> {
        if self.eat(b'!') {
            return Ok(Operand::Not(Box::new(self.simple_operand()?)));
        }
        if self.eat(b'[') {
            let base = self.simple_operand()?;
            let (base, offset) = match base {
                Operand::Sum(name, offset) => (Operand::Word(name), offset),
                base => (base, 0),
            };
            self.expect(b']')?;
            return Ok(Operand::Address(Box::new(base), offset));
        }
        if self.eat(b'{') {
            return self.operands_until(b'}').map(Operand::Vector);
        }
        if self.eat(b'(') {
            return self.operands_until(b')').map(Operand::List);
        }
        match self.peek().cloned() {
            Some(Token::Single(bits)) => {
                self.at += 1;
                Ok(Operand::Single(bits))
            }
            Some(Token::Double(bits)) => {
                self.at += 1;
                Ok(Operand::Double(bits))
            }
            Some(Token::Word(word)) => {
                let name = word.to_owned();
                self.at += 1;
                if self.eat(b'+') {
                    return Ok(Operand::Sum(name, self.int()? as i64));
                }
                if self.is_mark(b'-') {
                    return Ok(Operand::Sum(name, self.int()? as i64));
                }
                Ok(Operand::Word(name))
            }
            _ => Ok(Operand::Int(self.int()?)),
        }
    }

    fn operands_until(&mut self, end: u8) -> Result<Vec<Operand>> {
        let mut operands = Vec::new();
        while !self.eat(end) {
            operands.push(self.operand()?);
            if !self.eat(b',') && !self.is_mark(end) {
                return self.error(format!("expected ',' or '{}'", end as char));
            }
        }
        Ok(operands)
    }
}
