// The warm tier: a function for each node, since a platform starts one instance of each as long as it is called once at
// a time. --param warmNodes=12 makes twelve; by default there are none.

const MOST_RESOURCES = 400; // of the 500 that CloudFormation takes; a node is two, and three more with a schedule
const NODES_IN_A_POLICY = 60; // which has at most 6,144 characters
const LEAST_MEMORY = 256; // of which 192 MiB are the program's

const HERE = "${AWS::Region}:${AWS::AccountId}";

const PARAMETERS = [
  "warmNodes",
  "warmMemory",
  "warmRate",
  "warmVpc",
  "warmSubnets",
  "warmTrainerGroup",
  "warmPort",
];

const nodesOf = (count) => Array.from({ length: count }, (_, number) => `warm-${number}`);

const node = (name, given) => ({
  name: `\${param:prefix}-${name}`,
  description: "Holds shards of the warm tier in its memory",
  image: { name: "functions", command: ["stoker_functions.aws.warm_node"] },
  role: "WarmRole",
  // All but 192 MiB is for shards. A whole processor answers as fast as the network of a function goes.
  memorySize: Number(given.warmMemory),
  // An invocation ends by itself soon after the last request; one that is needed for longer is called again.
  timeout: 900,
  ephemeralStorageSize: 512,
  // The instance that serves, and a second while it is in doubt which one is the node; a mistake starts no more.
  reservedConcurrency: 2,
  // Three lines for each call, of which there is one a minute and node: nobody reads them after a week.
  logRetentionInDays: 7,
  environment: {
    // CloudFormation puts the secret in when it deploys; neither this file nor the template has it.
    STOKER_WARM_SECRET:
      "{{resolve:secretsmanager:${param:warmSecret}:SecretString:::${param:warmSecretVersion}}}",
  },
  ...(given.warmVpc && {
    vpc: { subnetIds: given.warmSubnets.split(","), securityGroupIds: [{ Ref: "WarmNodeGroup" }] },
  }),
  ...(given.warmRate && warming(name, given.warmRate)),
});

// Keeps what a node holds while no proxy runs, which does so itself. Nobody is dialled. A call that fails, or has to wait
// since the node serves, has no second try: the next one is due soon, and one that serves is warm.
const warming = (name, rate) => ({
  maximumRetryAttempts: 0,
  maximumEventAge: 60,
  events: [
    {
      schedule: { rate, description: "Keeps a node warm", input: { node: name, proxy: "none:0", task: "warm" } },
    },
  ],
});

const roleOf = (given) => ({
  Type: "AWS::IAM::Role",
  Properties: {
    AssumeRolePolicyDocument: {
      Version: "2012-10-17",
      Statement: [{ Effect: "Allow", Principal: { Service: "lambda.amazonaws.com" }, Action: "sts:AssumeRole" }],
    },
    Policies: [
      {
        PolicyName: "warm",
        PolicyDocument: {
          Version: "2012-10-17",
          Statement: [
            {
              Effect: "Allow",
              Action: ["logs:CreateLogStream", "logs:PutLogEvents"],
              Resource: [
                {
                  "Fn::Sub": `arn:\${AWS::Partition}:logs:${HERE}:log-group:/aws/lambda/\${param:prefix}-warm-*:*`,
                },
              ],
            },
            ...(given.warmVpc ? networking() : []),
          ],
        },
      },
    ],
  },
});

// Lambda itself makes network interfaces as the function's role, and takes nothing narrower; the function may not.
const networking = () => {
  const actions = [
    "ec2:CreateNetworkInterface",
    "ec2:DescribeNetworkInterfaces",
    "ec2:DescribeSubnets",
    "ec2:DeleteNetworkInterface",
    "ec2:AssignPrivateIpAddresses",
    "ec2:UnassignPrivateIpAddresses",
  ];
  const nodes = { "Fn::Sub": `arn:\${AWS::Partition}:lambda:${HERE}:function:\${param:prefix}-warm-*` };
  const itself = { ArnLike: { "lambda:SourceFunctionArn": [nodes] } };
  return [
    { Effect: "Allow", Action: actions, Resource: ["*"] },
    { Effect: "Deny", Action: actions, Resource: ["*"], Condition: itself },
  ];
};

// Nodes dial the proxy, which is in the trainer's security group, and nothing else in the world.
const network = (given) => {
  const port = { IpProtocol: "tcp", FromPort: Number(given.warmPort), ToPort: Number(given.warmPort) };
  return {
    WarmNodeGroup: {
      Type: "AWS::EC2::SecurityGroup",
      Properties: {
        GroupDescription: "Nodes of the warm tier",
        VpcId: given.warmVpc,
        SecurityGroupEgress: [
          { ...port, DestinationSecurityGroupId: given.warmTrainerGroup, Description: "To the proxy" },
        ],
      },
    },
    WarmProxyIngress: {
      Type: "AWS::EC2::SecurityGroupIngress",
      Properties: {
        ...port,
        GroupId: given.warmTrainerGroup,
        SourceSecurityGroupId: { "Fn::GetAtt": ["WarmNodeGroup", "GroupId"] },
        Description: "From nodes of the warm tier",
      },
    },
  };
};

// Whoever runs a proxy calls the nodes and knows the secret: the trainer does, and whomever these are attached to.
const policies = (names) => {
  // AWS puts six characters behind the name of a secret.
  const secret = { "Fn::Sub": `arn:\${AWS::Partition}:secretsmanager:${HERE}:secret:\${param:warmSecret}-??????` };
  const parts = Array.from({ length: Math.ceil(names.length / NODES_IN_A_POLICY) }, (_, part) =>
    names.slice(part * NODES_IN_A_POLICY, (part + 1) * NODES_IN_A_POLICY)
  );
  return Object.fromEntries(
    parts.map((part, number) => [
      `WarmPolicy${number}`,
      {
        Type: "AWS::IAM::ManagedPolicy",
        Properties: {
          Description: "Calling the nodes of the warm tier",
          Roles: [{ Ref: "TrainerRole" }],
          PolicyDocument: {
            Version: "2012-10-17",
            Statement: [
              { Effect: "Allow", Action: ["secretsmanager:GetSecretValue"], Resource: [secret] },
              {
                Effect: "Allow",
                Action: ["lambda:InvokeFunction"],
                Resource: part.map((name) => ({
                  "Fn::GetAtt": [`${name.replace("w", "W").replace("-", "Dash")}LambdaFunction`, "Arn"],
                })),
              },
            ],
          },
        },
      },
    ])
  );
};

const numberOf = (given, name, least, most) => {
  const number = Number(given[name]);
  if (!Number.isInteger(number) || number < least || number > most) {
    throw new Error(`${name} is ${given[name]}, and must be a number from ${least} to ${most}`);
  }
  return number;
};

const checked = (given) => {
  const count = numberOf(given, "warmNodes", 0, MOST_RESOURCES / (given.warmRate ? 5 : 2));
  numberOf(given, "warmMemory", LEAST_MEMORY, 10240);
  numberOf(given, "warmPort", 1, 65535);
  const network = ["warmVpc", "warmSubnets", "warmTrainerGroup"].filter((name) => given[name]);
  if (network.length % 3) {
    throw new Error(`${network} is not enough: a network is warmVpc, warmSubnets and warmTrainerGroup`);
  }
  return count;
};

module.exports = async ({ resolveVariable }) => {
  const values = await Promise.all(PARAMETERS.map((name) => resolveVariable(`param:${name}`)));
  const given = Object.fromEntries(PARAMETERS.map((name, number) => [name, values[number]]));
  const nodes = nodesOf(checked(given));
  if (!nodes.length) return { functions: {}, resources: {} };
  const invoking = policies(nodes);
  return {
    functions: Object.fromEntries(nodes.map((name) => [name, node(name, given)])),
    resources: {
      Resources: { WarmRole: roleOf(given), ...invoking, ...(given.warmVpc && network(given)) },
      Outputs: {
        WarmPolicies: { Value: { "Fn::Join": [" ", Object.keys(invoking).map((name) => ({ Ref: name }))] } },
      },
    },
  };
};
