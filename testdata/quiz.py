import os, select, sys, termios, time, tty
F = os.environ['F'] + '/'
def say(text): os.write(1, text.encode())
def got(b): open(F + 'got', 'a').write(repr(b)[1:] + '\n')
def menu(head, *choices):
    say('\x1b[?25l' + head + '\r\n' + ''.join('❯ '[2*(i>0):] + ' '*2*(i>0) + c + '\r\n' for i, c in enumerate(choices)))
def raw(echo=False):
    tty.setraw(0)
    if echo:
        modes = termios.tcgetattr(0)
        modes[3] |= termios.ECHO
        termios.tcsetattr(0, termios.TCSANOW, modes)
def key(within): return os.read(0, 1).decode() if select.select([0], [], [], within)[0] else ''
def rest(within):
    typed, end = '', time.time() + within
    while time.time() < end: typed += key(max(0, end - time.time()))
    return repr(typed)
def mark(name): open(F + name, 'w').close()
def marked(name): return os.path.exists(F + name)
def until(name):
    while not marked(name): time.sleep(.01)
